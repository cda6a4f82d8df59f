"""The branch of a run stays for as long as the settings of the run's own code location say."""

from datetime import UTC, datetime, timedelta

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster.cleanup.jobs import end_named_refs, reap_branches, sweep_discarded
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.runs.discarding import discarded_tag_name
from branchlake_dagster.runs.run_tags import RunState, is_opened_by
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


def failing(namespace: str) -> list[dg.AssetsDefinition]:
    @dg.asset(key=[namespace, "t"], metadata=table_metadata(require_checks=False))
    def t() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    @dg.asset(key=[namespace, "u"], deps=[t])
    def u() -> pl.DataFrame:
        raise RuntimeError("boom")

    return [t, u]


@pytest.fixture
def keeping(lakehouse: Lakehouse) -> Lakehouse:
    """The lake with the settings of a code location that keeps branches and discarded data for longer."""
    return Lakehouse(
        lakehouse.settings.model_copy(update={"keep_failed_hours": 8.0, "discard_grace_h": 72.0})
    )


def reaped(lake: Lakehouse, p: Project, branch: str, after: timedelta) -> bool:
    """Whether a pass of the reaper with the settings of `lake` ends the branch, `after` from now."""
    decisions = reap_branches(lake, p.instance, now=lambda: datetime.now(UTC) + after, dry_run=True)
    return next(one.deletes_branch for one in decisions if one.branch == branch)


def test_every_reaper_and_publisher_follows_the_settings_of_the_run(
    lakehouse: Lakehouse, keeping: Lakehouse, namespace: str
) -> None:
    with project(keeping, *failing(namespace)) as p:
        run_id = p.run(ok=False)
        branch = f"run-{run_id}"
        elsewhere = Reconciler.from_lake(lakehouse, p.instance, p.graph)
        assert [elsewhere.reconcile_run(run_id).state for _ in range(2)] == [
            RunState.DISCARDED,
            RunState.KEPT,
        ]
        assert not reaped(lakehouse, p, branch, timedelta(hours=7))
        assert reaped(lakehouse, p, branch, timedelta(hours=9))
        p.instance.add_run_tags(run_id, {"note": "tags of others change nothing"})
        assert not reaped(lakehouse, p, branch, timedelta(hours=7))

        # A person who names the branch ends it.
        ended, _ = end_named_refs(lakehouse, p.instance, [branch])
        assert [one.deletes_branch for one in ended] == [True]

        def swept(after: timedelta) -> bool:
            late = datetime.now(UTC) + after
            found = sweep_discarded(lakehouse, p.instance, now=lambda: late, dry_run=True)
            return next(one.done for one in found if one.tag == discarded_tag_name(branch))

        assert not swept(timedelta(hours=71))
        assert swept(timedelta(hours=73))


@memory.ON_BOTH
def test_a_branch_without_retention_follows_the_settings_of_the_reader(
    lakehouse: Lakehouse, keeping: Lakehouse, namespace: str
) -> None:
    """Older versions recorded none."""
    with project(keeping, *failing(namespace)) as p:
        run_id = p.run(ok=False)
        run = p.instance.get_run_by_id(run_id)
        assert run is not None
        assert is_opened_by(run.tags, run_id)
        (recorded,) = [name for name in run.tags if name.endswith("retention")]
        p.instance.add_run_tags(run_id, {recorded: ""})
        assert reaped(lakehouse, p, f"run-{run_id}", timedelta(0))
        assert not reaped(keeping, p, f"run-{run_id}", timedelta(0))
        end_named_refs(lakehouse, p.instance, [f"run-{run_id}"])
