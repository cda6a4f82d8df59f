"""A pass is bounded: in time, in what it says, and one at a time."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication import outcome as report
from branchlake_dagster.publication import publication_sensor
from branchlake_dagster.publication import reconciler as reconciler_module
from branchlake_dagster.publication.outcome import Outcome
from branchlake_dagster.publication.publication_sensor import PassReport
from branchlake_dagster.publication.reconciler import acquire_pass_lock
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.publication.reconcile.test_recheck import (
    appending,
    at_most,
    check_run,
    rows,
    run,
)
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

# -- what a tick says ------------------------------------------------------------------------------------


def outcomes(action: RunState, count: int) -> Iterator[Outcome]:
    for number in range(count):
        yield Outcome(f"run-{number}", str(number), action, "x" * 400)


def test_thousands_of_foreign_branches_are_one_clause() -> None:
    tick = PassReport()
    assert not any(tick.add(one) for one in outcomes(RunState.UNKNOWN_RUN, 4300))
    assert tick.format_message() == (
        "Nothing to publish. Of the other branches 4300 belong to no run of this Dagster."
    )


def test_a_thousand_publications_are_ten_and_a_number() -> None:
    tick = PassReport()
    logged = sum(tick.add(one) for one in outcomes(RunState.PUBLISHED, 1000))
    list(map(tick.add, outcomes(RunState.WAITING, 7)))
    assert logged == 500
    assert len(tick.format_message()) < 4000
    assert "and 990 more, in the log" in tick.format_message()
    assert "7 wait or are running" in tick.format_message()


def test_nothing_at_all() -> None:
    assert PassReport().format_message() == "Nothing to publish."


# -- one at a time ---------------------------------------------------------------------------------------


def test_one_pass_at_a_time_per_lake(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    other_lake = Settings(state_dir=tmp_path, nessie_uri="http://127.0.0.1:1/api/v2")
    seen: list[bool] = []

    def meanwhile() -> None:
        with acquire_pass_lock(settings) as mine:
            seen.append(mine)

    with acquire_pass_lock(settings) as mine, acquire_pass_lock(other_lake) as theirs:
        assert (mine, theirs) == (True, True)
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()
        with acquire_pass_lock(settings) as again:
            seen.append(again)
    assert seen == [False, False]
    with acquire_pass_lock(settings) as mine:
        assert mine


# -- bounded in time -------------------------------------------------------------------------------------


class Ticking:
    """A clock that goes on by a second whenever somebody looks at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def free(namespace: str, **options: Any) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "t"], metadata=table_metadata(write_mode="append", require_checks=False), **options
    )
    def made() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    return made


def ours(p: Project, found: Iterator[Outcome]) -> list[Outcome]:
    known = {run.run_id for run in p.instance.get_runs()}
    return [one for one in found if one.run_id in known]


@memory.ON_BOTH
def test_what_does_not_fit_waits_for_the_next_tick_and_the_oldest_comes_first(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler_module, "MAX_BATCH_SIZE", 2)
    with project(lakehouse, free(namespace)) as p:
        ids = [p.run() for _ in range(5)]
        reconciler = p.reconciler()
        reconciler._clock = Ticking()
        found = ours(p, reconciler.reconcile_branches(budget_s=1.5))
        assert [(one.run_id, one.state) for one in found] == [
            (run_id, RunState.PUBLISHED if number < 2 else RunState.WAITING)
            for number, run_id in enumerate(ids)
        ]
        assert {one.detail for one in found[2:]} == {
            "left to the next tick, because the time budget is used up"
        }
        later = ours(p, p.reconciler().reconcile_branches())
        assert [(one.run_id, one.state) for one in later] == [(i, RunState.PUBLISHED) for i in ids[2:]]
        assert len(p.rows(namespace, "t")) == 5


@pytest.mark.filterwarnings("ignore:Parameter `backfill_policy`")
def test_the_report_of_many_partitions_continues_where_it_stopped(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_BATCH_SIZE", 2)
    names = [f"p{number:02}" for number in range(12)]

    @dg.asset(
        key=[namespace, "t"],
        partitions_def=dg.StaticPartitionsDefinition(names),
        backfill_policy=dg.BackfillPolicy.single_run(),
        metadata=table_metadata(partition_by="part", require_checks=False),
    )
    def parts(context: dg.AssetExecutionContext) -> pl.DataFrame:
        return pl.DataFrame({"part": list(context.partition_keys)})

    with project(lakehouse, parts) as p:
        tags = {"dagster/asset_partition_range_start": "p00", "dagster/asset_partition_range_end": "p11"}
        run_id = p.run(tags=tags)
        seen: list[int] = []
        for _ in range(20):
            reconciler = p.reconciler()
            reconciler._finisher._clock = Ticking()
            reconciler._clock = lambda: 0.0
            (outcome,) = ours(p, reconciler.reconcile_branches(budget_s=3.5))
            assert outcome.state is RunState.PUBLISHED
            told = p.instance.get_run_by_id(run_id)
            assert told is not None
            seen.append(len(p.observations([namespace, "t"])))
            if RunTag.PUBLICATION in told.tags:
                break
            assert told.tags[RunTag.REPORTED] == str(seen[-1])
            assert run_branch_name(run_id) in p.branches()
        assert seen == sorted(set(seen)), "every tick tells some more"
        assert len(seen) > 1
        assert sorted(one.partition or "" for one in p.observations([namespace, "t"])) == names
        assert run_branch_name(run_id) not in p.branches()


# -- checks on whole tables ------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "published"), [(1000, 9), (12, 8)])
def test_nine_waiting_runs_share_their_checks(
    lakehouse: Lakehouse, namespace: str, most: int, published: int
) -> None:
    """Forty check runs were made for nine; one of them that is to blame is found by dividing."""
    asset = appending(namespace)
    with project(lakehouse, asset, at_most(asset, most)) as p:
        p.settle(run(p, namespace, 0))
        ids = [run(p, namespace, 12 if number == 4 and most == 12 else 1) for number in range(9)]
        done: dict[str, RunState] = {}
        checks = 0
        for _ in range(40):
            for outcome in ours(p, p.reconciler().reconcile_branches()):
                if outcome.check_run:
                    check_run(p, outcome)
                    checks += 1
                if outcome.state in (RunState.PUBLISHED, RunState.REFUSED):
                    done[outcome.run_id] = outcome.state
            if len(done) == len(ids):
                break
        assert sum(action is RunState.PUBLISHED for action in done.values()) == published
        assert checks <= (1 if published == 9 else 12)
        assert rows(p, namespace) == [0] + [1] * published
        if published == 8:
            assert done[ids[4]] is RunState.REFUSED
        assert not [name for name in p.branches() if name.startswith("publish-") and name[8:] in ids]


def test_a_check_run_that_takes_too_long_is_given_up_and_made_again(
    lakehouse: Lakehouse, namespace: str
) -> None:
    asset = appending(namespace)
    with project(lakehouse, asset, at_most(asset, 100)) as p:
        p.settle(run(p, namespace, 1))
        first, second = run(p, namespace, 2), run(p, namespace, 3)
        p.settle(first)
        asked = p.settle(second)
        assert asked.check_run is not None
        stuck = dg.DagsterRun("__ASSET_JOB", status=dg.DagsterRunStatus.STARTING, tags=asked.check_run.tags)
        p.instance.add_run(stuck)
        p.instance.report_dagster_event(
            dg.DagsterEvent(dg.DagsterEventType.RUN_START.value, stuck.job_name), stuck.run_id
        )
        assert "waits for its checks" in p.settle(second).detail
        settings = lakehouse.settings.model_copy(update={"recheck_timeout_min": 0.0001})
        lake = Lakehouse(settings)
        again = reconciler_module.Reconciler.from_lake(lake, p.instance, p.graph).reconcile_run(second)
        assert again is not None
        assert again.check_run is not None
        assert again.check_run.key.endswith("/1")
        ended = p.instance.get_run_by_id(stuck.run_id)
        assert ended is not None
        assert ended.is_failure
        check_run(p, again)
        assert p.settle(second).state is RunState.PUBLISHED


# -- the sensor ------------------------------------------------------------------------------------------


def test_the_sensor_leaves_a_lake_alone_on_which_another_pass_is_at_work(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication_sensor, "_PATIENCE_S", 0.2)
    with project(lakehouse, free(namespace)) as p:
        run_id = p.run()
        repository = p.definitions.get_repository_def()
        sensor = repository.get_sensor_def("publication_sensor")
        resource = LakehouseResource.from_settings(lakehouse.settings)
        with dg.build_sensor_context(
            instance=p.instance, repository_def=repository, resources={"lakehouse": resource}
        ) as context:
            with acquire_pass_lock(lakehouse.settings):
                assert "Another pass" in (sensor.evaluate_tick(context).skip_message or "")
            assert run_branch_name(run_id) in p.branches()
            assert "published" in (sensor.evaluate_tick(context).skip_message or "")
        assert run_branch_name(run_id) not in p.branches()


def test_the_sensor_publishes_beside_a_stopped_pass(lakehouse: Lakehouse, namespace: str) -> None:
    with project(lakehouse, free(namespace)) as p:
        run_id = p.run()
        repository = p.definitions.get_repository_def()
        sensor = repository.get_sensor_def("publication_sensor")
        resource = LakehouseResource.from_settings(lakehouse.settings)
        with (
            dg.build_sensor_context(
                instance=p.instance, repository_def=repository, resources={"lakehouse": resource}
            ) as context,
            acquire_pass_lock(lakehouse.settings, now=lambda: 0.0) as standing,
        ):
            assert standing
            sensor.evaluate_tick(context)
        assert run_branch_name(run_id) not in p.branches()
        assert p.rows(namespace, "t") == [{"n": 1}]
