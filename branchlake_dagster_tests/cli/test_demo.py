"""The main job on the real servers: few simulated objects; in `make test-soak` real snapshots, if present, or 2,000 objects."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest

from branchlake_dagster.cli.run_branches import gather_status
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.sda.commands.demo_run import INGEST_JOBS, run_demo
from branchlake_dagster.sda.graph import code_location
from branchlake_dagster.sda.sources import GpSource
from branchlake_dagster_tests.suite import soak
from branchlake_dagster_tests.suite.json_contract import check_output

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

SNAPSHOTS = Path(__file__).parents[2].resolve().parent / "shared" / "data" / "gp"
OBJECTS = 2_000 if soak.soaking() else 500
TWO = ("active-20260808T0220Z.tle.gz", "active-20260808T0713Z.tle.gz")


@pytest.fixture
def dagster_home(tmp_path: Path) -> None:
    before = dict(os.environ)
    os.environ["DAGSTER_HOME"] = str(tmp_path / "dagster")
    yield
    os.environ.clear()
    os.environ.update(before)


def test_the_demo_publishes_what_passes_and_blocks_what_does_not(
    lakehouse: Lakehouse, dagster_home: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_location, "GpSource", partial(GpSource, simulated_objects=OBJECTS))
    files = [str(SNAPSHOTS / name) for name in TWO]
    real = soak.soaking() and all(Path(name).exists() for name in files)
    result = run_demo(lakehouse.settings, files if real else [], say=lambda _: None)

    check_output(["demo", "--json"], json.dumps(result.as_dict()))
    assert result.as_expected, [(line.job, line.partition, line.reason) for line in result.lines]
    published = [line for line in result.lines if line.publication]
    (blocked,) = [line for line in result.lines if not line.publication]
    assert blocked.partition.startswith("sim-bad-")
    assert "rejected_share" in (blocked.reason or "")
    ingested = [line.publication for line in published if line.job in INGEST_JOBS]
    assert (len(ingested), len(set(ingested))) == (3, 3), "runs of different tables are published each alone"
    observed = next(line.rows for line in published if line.job == "observations_job") or {}
    raw = [count for line in published for name, count in (line.rows or {}).items() if ".raw_" in name]
    assert observed["sda.observations"] == sum(raw) > 15 * OBJECTS
    assert result.catalogue_objects == (16_095 if real else OBJECTS)

    # `main` holds exactly the published rows: the last publication of each table tells its size.
    expected = {}
    for line in published:
        expected |= line.rows or {}
    catalog = lakehouse.catalog()
    on_main = {
        f"sda.{name}": catalog.load_table(("sda", name)).scan().to_arrow().num_rows
        for _, name in catalog.list_tables("sda")
    }
    assert on_main == expected
    snapshots = catalog.load_table(("sda", "element_sets")).scan(selected_fields=("snapshot_id",)).to_arrow()
    assert not [key for key in set(snapshots["snapshot_id"].to_pylist()) if key.startswith("sim-bad-")]

    told = gather_status(lakehouse.settings)
    ours = {line.branch for line in result.lines}
    assert not [row for row in told["branches"] if row["branch"] in ours]
    assert {row["run_id"] for row in told["publications"]} <= {line.run for line in published}


def test_the_real_snapshots_of_the_demo_exist() -> None:
    if not SNAPSHOTS.exists():
        pytest.skip("the real catalogue snapshots are kept beside the repository, in shared/data/gp")
    assert all((SNAPSHOTS / name).exists() for name in TWO)
