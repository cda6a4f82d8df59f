"""The space pipeline gives the same tables on a Spark cluster, S3 and Postgres as on one machine."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.remote import stack
from branchlake_dagster_tests.sda.shuffled_bytes import Pipeline, Tables, crossing_objects, simulate_bytes
from branchlake_dagster_tests.sda.test_registry_lake import empty_lake

__all__ = ["empty_lake"]

pytestmark = [
    pytest.mark.spark,
    pytest.mark.soak,
    pytest.mark.timeout(1_800),
    # Dagster 1.13 warns about its own tags of multi-dimensional partitions.
    pytest.mark.filterwarnings("ignore:Non-compliant tag keys:DeprecationWarning"),
]

START = datetime(2026, 8, 8, 3, tzinfo=UTC)
SEED = 3


def compute_hour(lake: Lakehouse, folder: Path) -> Tables:
    """Compute all tables from the bytes of an hour: raw tables, observations, tracks, risks and alerts."""
    folder.mkdir()
    elements = crossing_objects(START, pairs=20, seed=SEED)
    rates = {"radar": 0.8, "optical": 0.1, "isl": 0.1}
    simulated = simulate_bytes(elements, START, hours=1, per_s=rates, seed=SEED)
    pipeline = Pipeline(lake, folder)
    pipeline.publish_catalog(elements, START)
    return pipeline.compute(simulated, None, 1)


def test_a_cluster_with_two_workers_gives_the_tables_of_one_machine(
    empty_lake: Lakehouse,
    remote_stack: stack.Stack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    print(f"seed {SEED}")  # noqa: T201 - a failure is repeated by it
    expected = compute_hour(empty_lake, tmp_path / "one-machine")
    heights = {name: frame.height for name, frame in expected.frames.items()}
    names = ("dead_letters", "observations", "associations", "tracks", "risks", "net_alerts")
    assert all(heights[name] for name in names), heights
    work = tmp_path / "second-worker"
    remote_stack.start_worker(work)
    for name, value in remote_stack.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DAGSTER_HOME", str(stack.dagster_home(tmp_path / "home")))
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(tmp_path / "state"))
    lake = Lakehouse(Settings())
    assert lake.servers.server_names() == (), "nothing is embedded"
    ensure_main_has_commit(lake.nessie)
    tables = compute_hour(lake, tmp_path / "cluster")
    differences = expected.differences(tables)
    assert not differences, "\n".join([f"seed {SEED}", *differences])
    assert list(work.glob("app-*/*/stderr")), "the second worker had an executor"
