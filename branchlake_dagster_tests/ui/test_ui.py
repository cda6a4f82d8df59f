"""The real UI in headless Chromium, on a real daemon: launch, see the checks, see the publication.

With BRANCHLAKE_TEST_SCREENSHOTS the pages of the documents are drawn anew into that folder, and those of the
newcomer's walk; without it the walk leaves its pictures in the test's temporary folder.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from playwright.sync_api import Browser, Page, expect, sync_playwright

from branchlake_dagster.cli import main
from branchlake_dagster.cli.dagster_home import dagster_dev, dagster_home
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.waiting import holds_within
from branchlake_dagster_tests.suite.absent import absent
from branchlake_dagster_tests.testing.documented import GETTING_STARTED, files
from branchlake_dagster_tests.ui.project import BAD_DAY, READERS_FILE

pytestmark = [pytest.mark.daemon, pytest.mark.timeout(1200)]

SHOP = f"shop_{uuid.uuid4().hex[:8]}"
MODULE = "branchlake_dagster_tests.ui.project"
PATIENCE_MS = 180_000
RELOAD_MS = 5_000
expect.set_options(timeout=PATIENCE_MS)  # a page's default does not reach what is expected
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCREENSHOTS = os.environ.get("BRANCHLAKE_TEST_SCREENSHOTS")


@pytest.fixture(scope="module")
def bad_day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, `daily` breaks its promise."""
    return tmp_path_factory.mktemp("ui") / "bad_day"


@pytest.fixture(scope="module")
def readers_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`my_lake.py` as docs/getting-started.md has it, but for the namespace: the lake outlives a session."""
    path = tmp_path_factory.mktemp("reader") / "my_lake.py"
    path.write_text(files(GETTING_STARTED)["my_lake.py"].replace('"shop"', f'"{SHOP}"'))
    write_wrong_days(path, {"2026-11-02": -0.1})
    return path


@pytest.fixture(scope="module")
def url(
    lakehouse: Lakehouse, tmp_path_factory: pytest.TempPathFactory, bad_day: Path, readers_file: Path
) -> Iterator[str]:
    home = tmp_path_factory.mktemp("dagster_home")
    before = dict(os.environ)
    os.environ["DAGSTER_HOME"] = str(home)
    environment = {"BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir), BAD_DAY: str(bad_day)}
    environment[READERS_FILE] = str(readers_file)
    try:
        dagster_home(lakehouse.settings)
        lakehouse.endpoints()
        with dagster_dev(MODULE, home=home, environment=environment) as address:
            yield address
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        absent("Chromium", hint="Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(
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


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1500, "height": 950})
    opened.set_default_timeout(PATIENCE_MS)
    yield opened
    opened.screenshot(path=tmp_path / "last.png")
    opened.close()


def press_materialize(page: Page, url: str, asset: str, *, namespace: str = "ui") -> None:
    page.goto(f"{url}/assets/{namespace}/{asset}")
    page.get_by_text(re.compile(r"^Materialize(…|\.\.\.)?$")).first.click()


def launch(page: Page, url: str, asset: str) -> str:
    """Press "Materialize" on the asset's page; the short run id of the message that appears."""
    press_materialize(page, url, asset)
    message = page.get_by_text(re.compile(r"Launched run [0-9a-f]{8}")).first
    expect(message).to_be_visible()
    return message.inner_text().split()[-1]


def backfill(page: Page, url: str, asset: str, which: str) -> None:
    """Launch a backfill of the partitions that the dialogue calls `which`."""
    press_materialize(page, url, asset)
    page.get_by_text(which, exact=True).first.click()
    page.get_by_text(re.compile("^Launch .*backfill$|^Launch [0-9]+ runs?$")).last.click()
    expect(page.get_by_text(re.compile("Created backfill")).first).to_be_visible()


def await_text(page: Page, address: str, pattern: str) -> None:
    """Open the page again until the text is there: it does not select an event that comes later.

    Ever less often, as a machine at work takes longer to draw the page than a quiet one waits for it.
    """
    until, wait_ms = time.monotonic() + PATIENCE_MS / 1000, RELOAD_MS
    while time.monotonic() < until:
        page.goto(address)
        try:
            expect(page.get_by_text(re.compile(pattern)).first).to_be_visible(timeout=wait_ms)
        except AssertionError:
            wait_ms = min(2 * wait_ms, PATIENCE_MS // 3)
            continue
        return
    raise AssertionError(f"{pattern} did not appear on {address}: {page.inner_text('body')}")


def published_rows(lakehouse: Lakehouse, asset: str) -> int:
    catalog, name = lakehouse.catalog(), ("ui", asset)
    return int(catalog.load_table(name).scan().to_arrow().num_rows) if catalog.table_exists(name) else 0


def picture(page: Page, name: str, *, height: int = 950) -> None:
    """For the documents."""
    if SCREENSHOTS:
        page.wait_for_timeout(2_000)
        part = {"x": 0, "y": 0, "width": 1500, "height": height}
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", clip=part)


def test_a_launch_ends_in_a_publication_that_can_be_read(page: Page, url: str, lakehouse: Lakehouse) -> None:
    run = launch(page, url, "good")
    await_text(page, f"{url}/assets/ui/good?view=events", "^Published as [0-9a-f]{64}")
    picture(page, "published-asset")
    expect(page.get_by_text(re.compile(f"^run-{run}")).first).to_be_visible()
    commit = page.get_by_text(re.compile(r"^http://.*/commits/main/[0-9a-f]{64}$")).first.inner_text()
    page.goto(f"{url}/assets/ui/good?view=checks")
    expect(page.get_by_text("not_negative").first).to_be_visible()
    expect(page.get_by_text("Passed").first).to_be_visible()
    page.goto(f"{url}/assets/ui/good")
    expect(page.get_by_text("Row count").first).to_be_visible()
    assert lakehouse.catalog().load_table(("ui", "good")).scan().to_arrow().num_rows == 10
    await_text(page, f"{url}/runs", "^branchlake: published$")
    assert "branchlake_" not in page.inner_text("body")
    page.goto(commit)
    expect(page.get_by_text(re.compile("ui.good")).first).to_be_visible()


def test_a_blocked_launch_is_red_and_says_why(page: Page, url: str, lakehouse: Lakehouse) -> None:
    run = launch(page, url, "bad")
    await_text(page, f"{url}/assets/ui/bad?view=events", "^Not published: .*not_negative.* failed")
    await_text(page, f"{url}/runs", "^branchlake: blocked$")
    expect(page.get_by_text("Failure").first).to_be_visible()
    picture(page, "runs")
    page.get_by_text(run).first.click()
    error = re.compile("NotPublished: Not published: check not_negative on ui/bad failed: 3 ")
    expect(page.get_by_text(error).first).to_be_visible()
    picture(page, "blocked-run", height=770)  # without the stack and its paths
    page.goto(f"{url}/assets/ui/bad?view=checks")
    expect(page.get_by_text("Failed").first).to_be_visible()
    page.goto(f"{url}/assets/ui/bad")
    expect(page.get_by_text("Row count").first.locator("xpath=..")).to_contain_text("0")
    assert not lakehouse.catalog().table_exists(("ui", "bad"))


def launch_days(page: Page, url: str, days: str) -> str:
    """Launch one day of the reader's asset, or begin a backfill of several; the message that appears."""
    press_materialize(page, url, "prices", namespace=SHOP)
    page.get_by_text("Custom", exact=True).first.click()
    field = page.get_by_placeholder(re.compile("^ex: |^No matching partitions$")).first
    field.fill(days)
    field.press("Enter")
    page.get_by_text(re.compile("^Launch 1 run$|^Launch backfill$")).last.click()
    message = page.get_by_text(re.compile(r"Launched run [0-9a-f]{8}|Created backfill")).first
    expect(message).to_be_visible()
    return message.inner_text()


def open_run(page: Page, url: str, run: str) -> None:
    page.goto(f"{url}/runs")
    page.get_by_text(run, exact=True).first.click()


def write_wrong_days(readers_file: Path, wrong_days: dict[str, float]) -> None:
    """Change the reader's file."""
    before = readers_file.read_text()
    readers_file.write_text(re.sub("(?m)^(WRONG_DAYS.*) = .*$", rf"\1 = {wrong_days}", before))
    assert str(wrong_days) in readers_file.read_text()


def reload_code(page: Page, url: str) -> None:
    """Reload the code location, which makes the reader's changed file count."""
    page.goto(f"{url}/deployment/locations")
    page.get_by_text("Reload", exact=True).first.click()
    expect(page.get_by_text("Code location reloaded").first).to_be_visible()


def prices_by_day(lakehouse: Lakehouse) -> dict[str, float]:
    """Day -> the lowest price that `main` has."""
    rows = lakehouse.catalog().load_table((SHOP, "prices")).scan().to_arrow()
    lowest = rows.group_by("day").aggregate([("eur", "min")])
    return dict(sorted(zip(map(str, lowest["day"].to_pylist()), lowest["eur_min"].to_pylist(), strict=True)))


def sensor_and_reaper_are_on(page: Page, url: str) -> None:
    page.goto(f"{url}/automation")
    expect(page.get_by_text("publication_sensor").first).to_be_visible()
    expect(page.get_by_text("reap_branches_schedule").first).to_be_visible()
    page.get_by_text("publication_sensor").first.click()
    expect(page.get_by_text(re.compile("^nothing to publish$|^published [0-9]+")).first).to_be_visible()
    picture(page, "sensor")


def test_the_walk_of_getting_started(
    page: Page, url: str, lakehouse: Lakehouse, readers_file: Path, tmp_path: Path
) -> None:
    """A good day, a bad day, its rows, the correction, its re-execution, a backfill with another bad day."""

    def picture_of(step: str) -> None:
        page.screenshot(path=Path(SCREENSHOTS or tmp_path) / f"walk-{step}.png")

    published = re.compile("^Published as [0-9a-f]{64}")
    partitions = f"{url}/assets/{SHOP}/prices?view=partitions"
    open_run(page, url, launch_days(page, url, "2026-11-01").split()[-1])
    expect(page.get_by_text(published).first).to_be_visible()
    picture_of("1-good-day")
    assert prices_by_day(lakehouse) == {"2026-11-01": 0.1}
    await_text(page, f"{url}/assets/{SHOP}/prices?view=events", "^Published as [0-9a-f]{64}")
    commit = page.get_by_text(re.compile(r"^http://.*/commits/main/[0-9a-f]{64}$")).first.inner_text()
    page.goto(f"{url}/assets/{SHOP}/prices?view=checks")
    expect(page.get_by_text("prices_are_positive").first).to_be_visible()
    expect(page.get_by_text("Passed").first).to_be_visible()
    page.goto(commit)
    expect(page.get_by_text(re.compile(f"{SHOP}.prices")).first).to_be_visible()

    # Its price has been wrong in the reader's file from the start.
    bad_run = launch_days(page, url, "2026-11-02").split()[-1]
    open_run(page, url, bad_run)
    error = (
        f"Not published: check prices_are_positive on {SHOP}/prices [2026-11-02] failed. main is as it was."
    )
    expect(page.get_by_text(error).first).to_be_visible()
    picture_of("2-bad-day")
    assert prices_by_day(lakehouse) == {"2026-11-01": 0.1}
    query = [
        "sql",
        f"SELECT item, eur FROM {SHOP}.prices WHERE eur <= 0",
        "--run",
        bad_run,
        "--format",
        "csv",
    ]
    rows = CliRunner().invoke(main, query, env={"BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir)})
    assert rows.stdout.splitlines()[1:] == ['"nut",-0.1']

    # The daemon begins a backfill within half a minute; the re-execution goes on meanwhile.
    write_wrong_days(readers_file, {"2026-11-04": -0.1})
    reload_code(page, url)
    launch_days(page, url, "[2026-11-03...2026-11-05]")
    open_run(page, url, bad_run)
    page.get_by_text(re.compile("^Re-execute all")).first.click()
    page.wait_for_url(lambda address: "/runs/" in address and bad_run not in address)
    expect(page.get_by_text(published).first).to_be_visible()
    picture_of("3-corrected")
    assert prices_by_day(lakehouse)["2026-11-02"] == 0.1

    sensor_and_reaper_are_on(page, url)
    await_text(page, partitions, r"^Failed \(1\)$")
    await_text(page, partitions, r"^Materialized \(4\)$")
    picture_of("4-backfill")
    days = dict.fromkeys(("2026-11-01", "2026-11-02", "2026-11-03", "2026-11-05"), 0.1)
    assert holds_within(PATIENCE_MS / 1000, lambda: prices_by_day(lakehouse) == days, every_s=0.5)
    page.goto(f"{url}/runs?view=backfills")
    page.locator("a[href*='/runs/b/']").first.click()
    page.wait_for_url(re.compile("/runs/b/"))
    # Not the link of the same name, which leads to the runs of everything.
    page.get_by_role("tab", name="Runs").click()
    expect(page.get_by_text("branchlake: published", exact=True)).to_have_count(2)
    expect(page.get_by_text("branchlake: blocked", exact=True)).to_have_count(1)
    picture_of("5-runs-of-the-backfill")


@pytest.mark.soak
def test_blocked_partitions_are_launched_again_and_published(
    page: Page, url: str, lakehouse: Lakehouse, bad_day: Path
) -> None:
    partitions = f"{url}/assets/ui/daily?view=partitions"
    bad_day.touch()
    backfill(page, url, "daily", "Missing")
    await_text(page, partitions, r"^Failed \(3\)$")
    await_text(page, f"{url}/runs?view=backfills", "^(Failed|Failure|Completed with failures)$")
    assert not lakehouse.catalog().table_exists(("ui", "daily"))
    bad_day.unlink()
    backfill(page, url, "daily", "Failed and missing")
    await_text(page, partitions, r"^Materialized \(3\)$")
    # A step has materialised before its run is judged; the last of them may still be at that.
    assert holds_within(PATIENCE_MS / 1000, lambda: published_rows(lakehouse, "daily") == 6, every_s=1.0)
    page.goto(f"{url}/asset-groups")
    expect(page.get_by_text("3 partitions").first).to_be_visible()
    picture(page, "graph")
