"""`kill -9` of a collector's process on the real Nessie, in each part of a pass; then the pass is repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyiceberg.table import Table

from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.garbage_collection.collected_lake import DAY, ROWS
from branchlake_dagster_tests.garbage_collection.test_collector_lake import SharedLake, shared

__all__ = ["shared"]  # a fixture

pytestmark = pytest.mark.chaos

_CHILD = "branchlake_dagster_tests.garbage_collection.killed_collection"
_SHOWN_BY_OTHERS = [  # `append` shows a kill while a plan is made, and `delete` one while it is executed
    pytest.param(moment, marks=pytest.mark.soak)
    for moment in ("mark", "list", "plan files", "plan", "deletions", "outcomes", "executed")
]
EXECUTING = ("delete", "deletions", "outcomes", "executed")


@pytest.fixture(scope="module")
def lakehouse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lakehouse]:
    """A lake of this module's own: a pass reads all tables on `main`, also the many of other tests."""
    lake = Lakehouse(Settings(state_dir=tmp_path_factory.mktemp("killed") / "state"))
    yield lake
    lake.servers.stop_all()


def killed_pass(lake: SharedLake, moment: str, days: float) -> None:
    """Run a pass in a process that is killed at a moment. Its present time is some days ago."""
    settings = lake.lake.settings
    environment = {
        **os.environ,
        "BRANCHLAKE_STATE_DIR": str(settings.state_dir),
        "BRANCHLAKE_WAREHOUSE": settings.warehouse_uri,
        "BRANCHLAKE_NESSIE_URI": lake.lake.nessie.uri,
    }
    command = [sys.executable, "-m", _CHILD, moment, str(days)]
    ended = subprocess.run(command, env=environment, check=False, timeout=300)
    assert ended.returncode == -signal.SIGKILL


def count_rows(lake: SharedLake, ref: str) -> int:
    """Read all rows, so each data file must exist."""
    table: Table = lake.shared.catalog(ref).load_table((lake.namespace, "t"))
    return table.scan().to_arrow().num_rows


@pytest.mark.parametrize("moment", ["append", "delete", *_SHOWN_BY_OTHERS])
def test_a_killed_collection_is_repeated(shared: SharedLake, moment: str) -> None:
    namespace, nessie = shared.namespace, shared.lake.nessie
    table = shared.shared.catalog(properties={"namespace.create": "true"}).create_table(
        (namespace, "t"), ROWS.schema
    )
    table.append(ROWS)
    head = nessie.reference(MAIN).hash
    nessie.create_tag(f"tag-{namespace}", from_ref=MAIN, from_hash=head)
    table.overwrite(ROWS.slice(0, 1))
    expected = {MAIN: 1, f"tag-{namespace}": 3, f"{MAIN}@{head}": 3}
    kept = shared.files()
    strays = {shared.stray(table.location(), f"{number}.parquet") for number in range(5)}
    shared.age()

    if moment in EXECUTING:
        shared.collector(2 * DAY).run()
        killed_pass(shared, moment, 0)
    else:
        killed_pass(shared, moment, 4)
        assert shared.files() == kept | strays
    assert {ref: count_rows(shared, ref) for ref in expected} == expected
    assert kept <= shared.files()

    shared.collector(2 * DAY).run()
    shared.collector().run()
    assert shared.files() == kept
    assert {ref: count_rows(shared, ref) for ref in expected} == expected
    collector = shared.collector()
    assert collector.status().open_plans == ()
    for path in strays:
        # The killed process could not record what it deleted; the next pass finds these files missing.
        states = {row["state"] for row in collector.journal.find_file(path)}
        assert states & {"deleted", "missing"}, path

    if moment in ("mark", "delete"):
        return  # these leave no file of the journal behind
    # The journal's own files that no commit names are found and deleted as all others.
    shared.age()
    unnamed = {file.path for file in collector.plan().sample}
    assert bool(unnamed) == (moment == "append")
    shared.collect()
    assert not [path for path in unnamed if Path(path).exists()]
    assert shared.collector().plan().file_count == 0
