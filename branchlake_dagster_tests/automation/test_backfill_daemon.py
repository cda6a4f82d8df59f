"""Concurrent runs through the real daemon: a backfill into a table that does not exist yet, and a recheck."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import dagster as dg
import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster_tests.daemon import daemon_of, graphql, launch, wait_for
from branchlake_dagster_tests.harness import published

pytestmark = [pytest.mark.daemon, pytest.mark.timeout(1800)]

MODULE = "branchlake_dagster_tests.automation.backfill_project"
PARTITIONS = 20
"""Twice what runs at a time: those that make the table, and those that find it."""
AT_A_TIME = 10
BACKFILL = """
mutation Backfill($params: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $params) {
    __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message }
  }
}
"""


@pytest.fixture(scope="module")
def namespace() -> str:
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="module")
def daemon(lakehouse: Lakehouse, namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One for both tests: its processes are what takes long to start."""
    more = {"BRANCHLAKE_TEST_PARTITIONS": str(PARTITIONS)}
    config = f"\nconcurrency:\n  runs:\n    max_concurrent_runs: {AT_A_TIME}\n"
    home = tmp_path_factory.mktemp("daemon")
    with daemon_of(MODULE, lakehouse, namespace, home, more=more, config=config) as url:
        yield url


def test_a_backfill_into_a_new_table_publishes_every_partition_unaided(
    daemon: str, lakehouse: Lakehouse, namespace: str
) -> None:
    names = [f"p{number:02}" for number in range(PARTITIONS)]
    found = graphql(
        daemon,
        BACKFILL,
        assetSelection=[{"path": [namespace, "parts"]}],
        partitionNames=names,
        fromFailure=False,
    )
    backfill = found["launchPartitionBackfill"]["backfillId"]
    with dg.DagsterInstance.get() as instance:

        def runs() -> list[dg.DagsterRun]:
            return list(instance.get_runs(dg.RunsFilter(tags={"dagster/backfill": backfill})))

        def all_published() -> bool:
            now = runs()
            told = [run.tags.get(RunTag.REASON) for run in now]
            assert not any(told), told
            return sum(RunTag.PUBLICATION in run.tags for run in now) == PARTITIONS

        wait_for(all_published, seconds=600)
        assert all(run.is_success for run in runs())
        rows = lakehouse.catalog().load_table((namespace, "parts")).scan().to_arrow().to_pylist()
        assert sorted((row["part"], row["n"]) for row in rows) == [
            (name, n) for name in names for n in (1, 2)
        ]
        branches = [run_branch_name(run.run_id) for run in runs()]
        told = published(lakehouse.nessie, branches)
        assert len(told) == PARTITIONS
        bases = {one.base_hash for one in told.values()}
        assert len(bases) < PARTITIONS, "no two runs started from one main: nothing was rebased"


def test_two_runs_meet_and_the_daemon_repeats_the_check(
    daemon: str, lakehouse: Lakehouse, namespace: str
) -> None:
    with dg.DagsterInstance.get() as instance:
        launched = [launch(daemon, MODULE, namespace, "sums") for _ in range(2)]

        def both_published() -> bool:
            now = [run for run in instance.get_runs() if run.run_id in launched]
            told = [run.tags.get(RunTag.REASON) for run in now]
            assert not any(told), told
            return sum(RunTag.PUBLICATION in run.tags for run in now) == 2

        wait_for(both_published, seconds=600)
        assert len(lakehouse.catalog().load_table((namespace, "sums")).scan().to_arrow()) == 2
        (again,) = [run for run in instance.get_runs() if RunTag.CHECKS_FOR in run.tags]
        assert again.tags[RunTag.CHECKS_FOR] in launched
        assert again.is_success
