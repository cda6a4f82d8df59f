"""A run that is not published looks it: the run, its partitions, its asset's page and what backfills see."""

import shlex
from collections.abc import Callable, Sequence

import dagster as dg
import polars as pl
import pytest
from click.testing import CliRunner
from dagster import EventLogEntry

from branchlake_dagster.cli import main
from branchlake_dagster.internals.dagster import report_planned_again
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication import finishing as finish
from branchlake_dagster.publication.verdict import LAUNCH_AGAIN
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import AssetMetadata, EventMetadata, RunTag
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.dagster_internals import get_and_update_asset_status_cache_value
from branchlake_dagster_tests.harness import Project, project, retry
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

AssetAndCheck = Callable[..., tuple[dg.AssetsDefinition, dg.AssetChecksDefinition]]
DAYS = dg.StaticPartitionsDefinition(["mon", "tue", "wed"])


class Values:
    """What the next run of the asset writes."""

    rows: Sequence[int] = (1, 2)


def daily(namespace: str, values: Values) -> tuple[dg.AssetsDefinition, dg.AssetChecksDefinition]:
    @dg.asset(key=[namespace, "t"], partitions_def=DAYS, metadata=table_metadata(partition_by="day"))
    def t(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"day": [context.partition_key] * len(values.rows), "n": list(values.rows)})

    @dg.asset_check(asset=t.key, metadata={AssetMetadata.CHECK_SCOPE: "rows"})
    def positive() -> dg.AssetCheckResult:
        bad = sum(n < 0 for n in values.rows)
        return dg.AssetCheckResult(passed=not bad, description="n > 0", metadata={"failing_rows": bad})

    return t, positive


def plain(namespace: str, values: Values) -> tuple[dg.AssetsDefinition, dg.AssetChecksDefinition]:
    @dg.asset(key=[namespace, "t"])
    def t() -> pl.DataFrame:
        return pl.DataFrame({"n": list(values.rows)})

    @dg.asset_check(asset=t.key)
    def positive() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=all(n >= 0 for n in values.rows), description="n > 0")

    return t, positive


def states(p: Project, namespace: str, *, is_cached: bool = False) -> dict[str, str]:
    """Each partition as Dagster's pages and its "failed and missing" backfills have it."""
    key = dg.AssetKey([namespace, "t"])
    if not is_cached:
        p.instance.wipe_asset_cached_status([key])
    cached = get_and_update_asset_status_cache_value(p.instance, key, DAYS)
    assert cached is not None
    filled = cached.deserialize_materialized_partition_subsets(DAYS)
    failed = cached.deserialize_failed_partition_subsets(DAYS)
    in_progress = cached.deserialize_in_progress_partition_subsets(DAYS)
    return {
        day: "in progress"
        if day in in_progress
        else "failed"
        if day in failed
        else "filled"
        if day in filled
        else "missing"
        for day in DAYS.get_partition_keys()
    }


def launch(p: Project, values: Values, rows: Sequence[int], day: str | None = None) -> tuple[str, str]:
    """The run's id and what the publisher did about it."""
    values.rows = rows
    run_id = p.run(partition=day)
    return run_id, p.settle(run_id).state


def status_of(p: Project, run_id: str) -> tuple[dg.DagsterRunStatus, str]:
    run = p.instance.get_run_by_id(run_id)
    assert run is not None
    return run.status, run.tags[RunTag.STATUS]


def test_a_blocked_partition_counts_as_failed_until_it_is_published(
    lakehouse: Lakehouse, namespace: str
) -> None:
    values = Values()
    with project(lakehouse, *daily(namespace, values)) as p:
        launch(p, values, [1, 2], "mon")
        run_id, action = launch(p, values, [3, -4, -5], "tue")
        assert action == RunState.BLOCKED
        assert status_of(p, run_id) == (dg.DagsterRunStatus.FAILURE, RunState.BLOCKED)
        assert states(p, namespace) == {"mon": "filled", "tue": "failed", "wed": "missing"}
        told = p.observations([namespace, "t"])[0]
        assert told.partition == "tue"
        assert told.metadata[EventMetadata.TABLE_ROWS].value == 2
        assert told.metadata[EventMetadata.FAILING_ROWS].value == 2
        assert EventMetadata.PARTITION_ROWS not in told.metadata
        assert launch(p, values, [3], "tue")[1] == RunState.PUBLISHED
        assert states(p, namespace) == {"mon": "filled", "tue": "filled", "wed": "missing"}
        told = p.observations([namespace, "t"])[0]
        assert told.metadata[EventMetadata.TABLE_ROWS].value == 3
        assert told.metadata[EventMetadata.PARTITION_ROWS].value == 1
        assert told.metadata[EventMetadata.PUBLICATION_DELAY_S].value >= 0
        assert "| tue | 3 |" in told.metadata["branchlake/preview"].value


@pytest.mark.parametrize("parent_end", [RunState.FAILED, RunState.BLOCKED])
def test_a_partition_of_an_unpublished_run_counts_as_filled_once_a_retry_is_published(
    lakehouse: Lakehouse, namespace: str, parent_end: RunState
) -> None:
    values = Values()
    t, positive = daily(namespace, values)

    @dg.asset_check(asset=t.key)
    def last() -> dg.AssetCheckResult:
        if values.rows == [7] and parent_end is RunState.FAILED:
            raise RuntimeError("not yet")
        return dg.AssetCheckResult(passed=values.rows != [7])

    with project(lakehouse, t, positive, last) as p:
        values.rows = [7]
        parent = p.run(partition="tue", ok=parent_end is not RunState.FAILED)
        p.settle(parent)
        assert status_of(p, parent) == (dg.DagsterRunStatus.FAILURE, parent_end)
        assert states(p, namespace)["tue"] == "failed"
        values.rows = [8]
        child = retry(p, parent, f"{namespace}__t_last")
        assert p.settle(child).state is RunState.PUBLISHED
        assert p.rows(namespace, "t") == [{"day": "tue", "n": 7}]
        assert states(p, namespace, is_cached=True)["tue"] == "filled"


@pytest.mark.parametrize("other_end", ["in progress", "failed"])
def test_a_published_retry_does_not_hide_a_later_run_of_its_partition(
    lakehouse: Lakehouse, namespace: str, other_end: str
) -> None:
    values = Values()
    t, positive = daily(namespace, values)

    @dg.asset_check(asset=t.key)
    def last() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=values.rows != [7])

    with project(lakehouse, t, positive, last) as p:
        values.rows = [7]
        parent = p.run(partition="tue")
        p.settle(parent)
        values.rows = [8]
        child = retry(p, parent, f"{namespace}__t_last")
        job = p.definitions.resolve_implicit_global_asset_job_def()
        other = p.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
        report_planned_again(p.instance, other, t.key, "tue", None)
        assert p.settle(child).state is RunState.PUBLISHED
        assert states(p, namespace)["tue"] == "in progress"
        if other_end == "failed":
            p.instance.report_run_failed(other)
        assert states(p, namespace)["tue"] == other_end


@pytest.mark.nessie
def test_a_blocked_run_names_the_command_that_shows_its_rows(lakehouse: Lakehouse, namespace: str) -> None:
    values = Values()
    with project(lakehouse, *daily(namespace, values)) as p:
        values.rows = [3, -4, -5]
        run_id = p.run(partition="tue")
        outcome = p.settle(run_id)
        _, command = outcome.next_step.rstrip(".").split("branchlake ")
        environment = {"BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir)}
        arguments = [*shlex.split(command), "--format", "csv"]
        done = CliRunner().invoke(main, arguments, env=environment)
        assert done.exit_code == 0, done.output
        assert sorted(line.split(",")[1] for line in done.stdout.splitlines()[1:]) == ["-4", "-5", "3"]
        failure = run_failure(p, run_id)
        assert outcome.next_step in failure.message
        assert outcome.next_step in str(p.observations([namespace, "t"])[0].description)


def run_failure(p: Project, run_id: str) -> EventLogEntry:
    """The event with which a run has failed."""
    entries = p.instance.all_logs(run_id, of_type=dg.DagsterEventType.RUN_FAILURE)
    (failure,) = [one for one in entries if one.dagster_event]
    return failure


def newest_event(p: Project, key: dg.AssetKey, day: str | None) -> dg.AssetObservation | None:
    """The newest event of an asset, or of one of its partitions, if it is an observation."""
    wanted = dg.AssetRecordsFilter(asset_key=key, asset_partitions=[day] if day else None)
    (observed,) = p.instance.fetch_observations(wanted, limit=1).records
    (materialized,) = p.instance.fetch_materializations(wanted, limit=1).records
    return observed.asset_observation if observed.storage_id > materialized.storage_id else None


@pytest.mark.parametrize(("asset_and_check", "day"), [(daily, "tue"), (plain, None)])
def test_the_newest_event_says_whether_main_has_what_was_materialized(
    lakehouse: Lakehouse, namespace: str, asset_and_check: AssetAndCheck, day: str | None
) -> None:
    values, key = Values(), dg.AssetKey([namespace, "t"])
    with project(lakehouse, *asset_and_check(namespace, values)) as p:
        launch(p, values, [-1], day)
        blocked = newest_event(p, key, day)
        assert blocked is not None
        assert blocked.metadata[EventMetadata.ON_MAIN].value is False
        assert blocked.metadata[EventMetadata.VERDICT].value == "blocked"
        assert "positive" in str(blocked.description)
        launch(p, values, [1], day)
        published = newest_event(p, key, day)
        assert published is not None
        assert published.metadata[EventMetadata.ON_MAIN].value is True
        assert published.metadata[EventMetadata.VERDICT].value == "passed"
        assert published.metadata[EventMetadata.PUBLICATION].value in str(published.description)


def test_a_published_partition_that_is_blocked_anew_counts_as_failed(
    lakehouse: Lakehouse, namespace: str
) -> None:
    values = Values()
    with project(lakehouse, *daily(namespace, values)) as p:
        launch(p, values, [1, 2], "mon")
        launch(p, values, [1, -2, 3], "mon")
        assert states(p, namespace)["mon"] == "failed"
        assert p.observations([namespace, "t"])[0].metadata[EventMetadata.TABLE_ROWS].value == 2


def test_what_another_run_has_published_since_stays_filled(lakehouse: Lakehouse, namespace: str) -> None:
    values = Values()
    with project(lakehouse, *daily(namespace, values)) as p:
        values.rows = [-1]
        late = p.run(partition="mon")
        launch(p, values, [1], "mon")
        assert p.settle(late).state == RunState.BLOCKED
        assert states(p, namespace)["mon"] == "filled"


def test_a_refused_run_fails_and_is_distinguished(lakehouse: Lakehouse, namespace: str) -> None:
    values = Values()
    with project(lakehouse, *plain(namespace, values)) as p:
        launch(p, values, [1])
        values.rows = [1, 2]
        late = p.run()
        launch(p, values, [1, 2, 3])
        assert p.settle(late).state == RunState.REFUSED
        assert status_of(p, late) == (dg.DagsterRunStatus.FAILURE, RunState.REFUSED)
        run = p.instance.get_run_by_id(late)
        assert run is not None
        assert run.tags[RunTag.VERDICT] == "refused"
        failure = run_failure(p, late)
        assert LAUNCH_AGAIN in failure.message
        assert p.observations([namespace, "t"])[0].metadata[EventMetadata.TABLE_ROWS].value == 3


def test_a_run_whose_other_step_failed_has_filled_nothing(lakehouse: Lakehouse, namespace: str) -> None:
    values = Values()
    asset, check = daily(namespace, values)

    @dg.asset(key=[namespace, "u"], deps=[asset], partitions_def=DAYS)
    def u() -> pl.DataFrame:
        raise RuntimeError("boom")

    with project(lakehouse, asset, check, u) as p:
        run_id = p.run(partition="mon", ok=False)
        assert p.settle(run_id).state == RunState.DISCARDED
        assert states(p, namespace)["mon"] == "failed"
        assert status_of(p, run_id) == (dg.DagsterRunStatus.FAILURE, RunState.FAILED)


def test_a_run_that_changed_no_table_stays_green(lakehouse: Lakehouse, namespace: str) -> None:
    values = Values()
    _, check = daily(namespace, values)

    @dg.asset(key=[namespace, "t"], partitions_def=DAYS)
    def nothing(lakehouse: LakehouseResource) -> None:
        lakehouse.open_branch()

    with project(lakehouse, nothing, check) as p:
        run_id = p.run(partition="mon")
        assert p.settle(run_id).state == RunState.DISCARDED
        assert status_of(p, run_id) == (dg.DagsterRunStatus.SUCCESS, RunState.UNCHANGED)
        assert states(p, namespace)["mon"] == "filled"


def test_a_publisher_that_dies_before_its_report_leaves_no_green_run(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Died

    values = Values()
    values.rows = [-1]
    with project(lakehouse, *daily(namespace, values)) as p:
        run_id = p.run(partition="mon")
        with monkeypatch.context() as patch:
            patch.setattr(finish, "report_outcome", die)
            with pytest.raises(Died):
                p.settle(run_id)
        assert status_of(p, run_id) == (dg.DagsterRunStatus.FAILURE, RunState.PENDING)
        assert p.settle(run_id).state == RunState.DISCARDED
        assert status_of(p, run_id) == (dg.DagsterRunStatus.FAILURE, RunState.FAILED)
        assert states(p, namespace)["mon"] == "failed"
