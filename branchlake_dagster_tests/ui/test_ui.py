"""The real UI in headless Chromium, on a real daemon: launch, see the checks, see the publication."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from branchlake_dagster.cli.local.dagster_dev import dagster_dev
from branchlake_dagster.cli.local.home import dagster_home
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.suite.absent import absent

pytestmark = [pytest.mark.daemon, pytest.mark.timeout(420)]

MODULE = "branchlake_dagster_tests.ui.project"
PATIENCE_MS = 120_000
RELOAD_MS = 5_000
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def url(lakehouse: Lakehouse, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("dagster_home")
    before = dict(os.environ)
    os.environ["DAGSTER_HOME"] = str(home)
    try:
        dagster_home(lakehouse.settings)
        lakehouse.endpoints()
        with dagster_dev(
            MODULE, home=home, environment={"BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir)}
        ) as address:
            yield address
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    if CHROMIUM is None:
        absent("Chromium", hint="Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--no-first-run",
            ],
        )
        opened = browser.new_page(viewport={"width": 1500, "height": 950})
        yield opened
        opened.screenshot(path=tmp_path / "last.png")
        browser.close()


def launch(page: Page, url: str, asset: str) -> str:
    """Press "Materialize" on the asset's page; the short run id of the message that appears."""
    page.goto(f"{url}/assets/ui/{asset}")
    page.get_by_text("Materialize", exact=True).first.click()
    message = page.get_by_text(re.compile(r"Launched run [0-9a-f]{8}")).first
    expect(message).to_be_visible(timeout=PATIENCE_MS)
    return message.inner_text().split()[-1]


def await_text(page: Page, address: str, pattern: str) -> None:
    """Open the page again until the text is there: it does not select an event that comes later."""
    for _ in range(PATIENCE_MS // RELOAD_MS):
        page.goto(address)
        try:
            expect(page.get_by_text(re.compile(pattern)).first).to_be_visible(timeout=RELOAD_MS)
        except AssertionError:
            continue
        return
    raise AssertionError(f"{pattern} did not appear on {address}: {page.inner_text('body')}")


def test_a_launch_ends_in_a_publication_that_can_be_read(page: Page, url: str, lakehouse: Lakehouse) -> None:
    run = launch(page, url, "good")
    await_text(page, f"{url}/assets/ui/good?view=events", "^Published as [0-9a-f]{64}")
    expect(page.get_by_text(re.compile(f"^run-{run}")).first).to_be_visible()
    page.goto(f"{url}/assets/ui/good?view=checks")
    expect(page.get_by_text("not_negative").first).to_be_visible()
    expect(page.get_by_text("Passed").first).to_be_visible(timeout=PATIENCE_MS)
    assert lakehouse.catalog().load_table(("ui", "good")).scan().to_arrow().num_rows == 10


def test_a_blocked_launch_says_why_and_shows_the_rows(page: Page, url: str, lakehouse: Lakehouse) -> None:
    launch(page, url, "bad")
    await_text(page, f"{url}/assets/ui/bad?view=events", "^Not published: .*not_negative.* failed")
    page.goto(f"{url}/assets/ui/bad?view=checks")
    expect(page.get_by_text("Failed").first).to_be_visible(timeout=PATIENCE_MS)
    assert not lakehouse.catalog().table_exists(("ui", "bad"))


def test_the_sensor_and_the_reaper_are_on(page: Page, url: str) -> None:
    page.goto(f"{url}/automation")
    expect(page.get_by_text("publication_sensor").first).to_be_visible(timeout=PATIENCE_MS)
    expect(page.get_by_text("reap_branches_schedule").first).to_be_visible()
