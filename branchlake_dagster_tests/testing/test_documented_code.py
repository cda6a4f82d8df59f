"""The Python of README.md and docs/: each block runs, after those before it on its page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from branchlake_dagster.testing import ThrowawayLake
from branchlake_dagster_tests.testing.documented import GETTING_STARTED, README, ROOT, files, load_file

PAGES = sorted([README, *(ROOT / "docs").rglob("*.md")])
OTHER_TESTS = {
    "docs/queries.md": "below, with a lake to query",
    "docs/testing.md": "test_documented.py, as files",
}
"""Pages whose code needs more than its page, and where it runs."""
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
NEEDS_A_SERVICE = (
    "from confluent_kafka import Producer",  # a Kafka broker
    'load_catalog("old")',  # another Iceberg catalog; test_adopting.py does the same with one
)
"""Code of blocks that need a service which these tests do not start."""


def blocks(page: Path) -> list[str]:
    texts = _PYTHON.findall(page.read_text())
    return [text for text in texts if not any(code in text for code in NEEDS_A_SERVICE)]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page) and str(page.relative_to(ROOT)) not in OTHER_TESTS],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("NESSIE", "https://nessie.example.org/api/v2")
    names: dict[str, Any] = {"__name__": "page"}
    for number, text in enumerate(blocks(page)):
        exec(compile(text, f"{page.name}, block {number}", "exec", dont_inherit=True), names)


@contextmanager
def environment_of(lake: ThrowawayLake) -> Iterator[None]:
    settings = lake.lakehouse.settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRANCHLAKE_STATE_DIR", str(settings.state_dir))
        patch.setenv("BRANCHLAKE_NESSIE_URI", lake.lakehouse.nessie.uri)
        patch.setenv("BRANCHLAKE_WAREHOUSE", settings.warehouse_uri)
        yield


def test_the_queries_of_the_page(lake: ThrowawayLake, tmp_path: Path) -> None:
    shop = load_file("my_lake.py", tmp_path, README)
    assert lake.publish(lake.run(shop.defs, select="shop/prices")).published
    published_at = datetime.now(UTC)
    shop = load_file("my_lake.py", tmp_path, README, edit=("0.1]", "-0.1]"))
    blocked = lake.run(shop.defs, select="shop/prices")
    assert not lake.publish(blocked).published
    own = [text for text in blocks(ROOT / "docs" / "queries.md") if "import connect" in text]
    assert len(own) == 2
    with environment_of(lake):
        for text in own:
            moment = published_at.isoformat()
            text = text.replace("a8960950", blocked.run_id[:8]).replace("2026-11-20T12:00", moment)
            names: dict[str, Any] = {"__name__": "page"}
            exec(compile(text, "queries.md", "exec", dont_inherit=True), names)
            if "worst" in names:
                assert names["worst"].polars()["eur"].to_list() == [-0.1]
            else:
                found = names["prices"].filter(pl.col("eur") <= 0).collect()
                assert found["eur"].to_list() == [-0.1]


def test_the_files_of_the_path_exist() -> None:
    assert set(files(README)) == set(files(GETTING_STARTED)) == {"my_lake.py"}
