"""Where a pass meets what it did not expect: no time left, no branch, a spoilt state, a person in between."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
from sqlalchemy.exc import OperationalError

from branchlake_dagster.cleanup.jobs import reap_branches
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieRefused, NessieUnavailable
from branchlake_dagster.publication import assessment as assess
from branchlake_dagster.publication import outcome as report
from branchlake_dagster.publication import publication_sensor
from branchlake_dagster.publication import reconciler as reconciler_module
from branchlake_dagster.publication.ledger import Published
from branchlake_dagster.publication.parked_runs import MAX_ATTEMPTS, discard_parked_run, iter_parked_runs
from branchlake_dagster.publication.publication_sensor import judge_unbranched_runs
from branchlake_dagster.publication.recheck import publication_branch_name
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.publication.commit.test_merges_outside import merge
from branchlake_dagster_tests.publication.reconcile.test_parked_runs import Clock
from branchlake_dagster_tests.publication.reconcile.test_pass import Ticking, free, ours
from branchlake_dagster_tests.publication.reconcile.test_recheck import (
    appending,
    at_most,
    check_run,
    rows,
    run,
)
from branchlake_dagster_tests.publication.workbench import FLAT, Workbench
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


def tags(p: Project, run_id: str) -> dict[str, str]:
    found = p.instance.get_run_by_id(run_id)
    assert found is not None
    return dict(found.tags)


def failing(namespace: str) -> dg.AssetsDefinition:
    @dg.asset(
        key=[namespace, "last"],
        deps=[[namespace, "a"], [namespace, "b"]],
        metadata=table_metadata(require_checks=False),
    )
    def last() -> pl.DataFrame:
        raise ValueError("no")

    return last


def plain(namespace: str, name: str) -> dg.AssetsDefinition:
    @dg.asset(key=[namespace, name], metadata=table_metadata(write_mode="append", require_checks=False))
    def made() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    return made


def test_without_time_left_a_failed_run_is_reported_before_its_branch_is_deleted(
    lakehouse: Lakehouse, namespace: str
) -> None:
    with project(lakehouse, plain(namespace, "a"), plain(namespace, "b"), failing(namespace)) as p:
        run_id = p.run(ok=False)
        late = p.reconciler()
        late._clock, late._finisher._clock = (lambda: 0.0), (lambda: 100.0)
        ours(p, late.reconcile_branches(budget_s=30))
        assert tags(p, run_id)[RunTag.VERDICT] == "failed"
        assert not [name for name in p.branches() if name == f"run-{run_id}"]


@pytest.fixture
def direct(lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lakehouse]:
    """A lake on which no branch can be made, so that runs write to `main`."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NessieUnavailable("none", status=503)

    with monkeypatch.context() as patch:
        patch.setattr(NessieClient, "create_branch", refuse)
        settings = lakehouse.settings.model_copy(update={"when_unavailable": "direct_main"})
        yield Lakehouse(settings)


def test_a_failing_run_without_a_branch_is_parked_and_abandoned_without_touching_main(
    direct: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with project(direct, free(namespace)) as p:
        run_id = p.run()
        monkeypatch.setattr(publication_sensor, "collect_evidence", lambda *_, **__: 1 / 0)

        def settle() -> list[RunState]:
            found = judge_unbranched_runs(p.lake, p.instance, p.graph)
            return [one.state for one in found]

        assert settle() == [RunState.TRY_AGAIN]
        assert settle() == [RunState.WAITING]
        for attempts in (MAX_ATTEMPTS - 1, 60):
            p.instance.add_run_tags(run_id, {RunTag.ATTEMPTS: str(attempts), RunTag.NEXT_ATTEMPT: "none"})
            assert settle() == [RunState.TRY_AGAIN]
            assert settle() == [RunState.PARKED]
        (one,) = iter_parked_runs(p.instance)
        assert "its rows stay" in discard_parked_run(p.lake.nessie, p.instance, one)
        assert "discarded-main" not in p.branches()
        assert settle() == []
        assert p.rows(namespace, "t") == [{"n": 1}]


def test_a_store_that_refuses_old_runs_leaves_time_for_young_ones(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler_module, "MAX_BATCH_SIZE", 2)
    with project(lakehouse, free(namespace)) as p:
        first, second, third = (p.run() for _ in range(3))
        real = assess.collect_evidence

        def refusing(instance: Any, runs: Any, *more: Any, **options: Any) -> Any:
            if runs[-1].run_id in (first, second):
                raise PermissionError("AccessDenied")
            return real(instance, runs, *more, **options)

        monkeypatch.setattr(assess, "collect_evidence", refusing)
        clock = Clock()
        for _ in range(3):
            reconciler = p.reconciler(now=clock)
            reconciler._clock = Ticking()
            ours(p, reconciler.reconcile_branches(budget_s=2.5))
            clock.now += timedelta(seconds=5)
        assert RunTag.PUBLICATION in tags(p, third)
        assert "AccessDenied" in tags(p, first)[RunTag.REASON]
        assert RunTag.ATTEMPTS not in tags(p, first)  # a store that refuses may be mended: it is not counted
        monkeypatch.setattr(assess, "collect_evidence", real)
        clock.now += timedelta(minutes=2)
        assert {one.state for one in ours(p, p.reconciler(now=clock).reconcile_branches())} == {
            RunState.PUBLISHED
        }


def test_an_abandoned_run_that_is_on_main_is_reported_by_the_next_pass(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with project(lakehouse, free(namespace)) as p:
        run_id = p.run()

        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError("the event log refuses")

        with monkeypatch.context() as patch:
            patch.setattr(report, "report_observations", refuse)
            ours(p, p.reconciler().reconcile_branches())
        p.instance.add_run_tags(run_id, {RunTag.NEXT_ATTEMPT: str(RunState.PARKED)})
        (one,) = iter_parked_runs(p.instance)
        assert "is on main" in discard_parked_run(lakehouse.nessie, p.instance, one)
        (outcome,) = ours(p, p.reconciler().reconcile_branches())
        assert outcome.state is RunState.PUBLISHED
        assert len(p.observations([namespace, "t"])) == 1
        assert len(p.rows(namespace, "t")) == 1


def test_one_run_that_spoils_a_shared_state_is_not_the_others_fault(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asset = appending(namespace)
    with project(lakehouse, asset, at_most(asset, 1000)) as p:
        p.settle(run(p, namespace, 0))
        first, *ids = [run(p, namespace, 1) for _ in range(4)]
        p.settle(first)
        bad, real = ids[1], NessieClient.commit

        def refusing(self: NessieClient, branch: str, **options: Any) -> Any:
            if bad in options.get("properties", {}).get("branchlake.run_id", ""):
                raise NessieRefused("content id", status=400)
            return real(self, branch, **options)

        monkeypatch.setattr(NessieClient, "commit", refusing)
        done: set[str] = set()
        for _ in range(6):
            for outcome in ours(p, p.reconciler().reconcile_branches()):
                if outcome.check_run:
                    check_run(p, outcome)
                if outcome.state is RunState.PUBLISHED:
                    done.add(outcome.run_id)
        assert done == set(ids) - {bad}
        assert RunTag.ATTEMPTS in tags(p, bad)


def test_a_failed_run_that_is_parked_and_reaped_is_listed_no_more(
    lakehouse: Lakehouse, namespace: str
) -> None:
    with project(lakehouse, plain(namespace, "a"), plain(namespace, "b"), failing(namespace)) as p:
        run_id = p.run(ok=False)
        p.instance.add_run_tags(
            run_id, {RunTag.NEXT_ATTEMPT: str(RunState.PARKED), RunTag.ATTEMPTS: str(MAX_ATTEMPTS)}
        )
        assert [one.run_id for one in iter_parked_runs(p.instance)] == [run_id]
        list(reap_branches(lakehouse, p.instance))
        assert list(iter_parked_runs(p.instance)) == []


@pytest.mark.parametrize("path", ["alone", "serializable", "group"])
def test_a_table_that_the_run_dropped_is_not_taken_for_a_merge_outside_branchlake(
    lakehouse: Lakehouse, namespace: str, path: str
) -> None:
    bench = Workbench(lakehouse, namespace)
    bench.seeded([("a", 0)], spec=FLAT)
    bench.seeded([("a", 0)], spec=FLAT, name="u")
    x, y = bench.run(reads=["t"] if path == "serializable" else None), bench.run()
    x.append([("a", 1)])
    half = lakehouse.nessie.reference(x.name).hash
    x.catalog.drop_table((namespace, "u"))
    y.append([("b", 3)])
    merge(lakehouse, x.name, half)
    results = bench.publish(y, x) if path == "group" else bench.publish(x)
    told = results[-1]
    there = lakehouse.catalog().table_exists((namespace, "u"))
    assert not there or not isinstance(told, Published)


@pytest.mark.parametrize("checked", [False, True])
def test_a_state_that_was_merged_outside_branchlake_before_its_checks_is_reported(
    lakehouse: Lakehouse, namespace: str, checked: bool
) -> None:
    asset = appending(namespace)
    with project(lakehouse, asset, at_most(asset, 10)) as p:
        p.settle(run(p, namespace, 1))
        first, second = run(p, namespace, 6), run(p, namespace, 7)
        p.settle(first)
        asked = p.settle(second)
        merge(lakehouse, publication_branch_name(second))
        if checked:
            check_run(p, asked)
        assert "outside branchlake" in p.settle(second).detail
        assert rows(p, namespace) == [1, 6, 7]


def test_a_database_that_is_away_for_one_state_delays_no_other_state(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asset = appending(namespace)
    with project(lakehouse, asset, at_most(asset, 100), free(f"{namespace}x")) as p:

        def start(n: int) -> str:
            config = {"ops": {f"{namespace}__t": {"config": {"n": n}}}}
            return p.run(dg.AssetKey([namespace, "t"]), run_config=config)

        p.settle(start(1))
        first, second = start(1), start(1)
        p.settle(first)
        p.settle(second)
        other = p.run(dg.AssetKey([f"{namespace}x", "t"]))
        real = type(p.instance).get_run_records

        def locked(self: Any, filters: Any = None, *more: Any, **options: Any) -> Any:
            if filters is not None and RunTag.CHECK_HASH in (filters.tags or {}):
                raise OperationalError("SELECT", {}, Exception("database is locked"))
            return real(self, filters, *more, **options)

        with monkeypatch.context() as patch:
            patch.setattr(type(p.instance), "get_run_records", locked)
            ours(p, p.reconciler().reconcile_branches())
        assert RunTag.PUBLICATION in tags(p, other)
        p.settle(second)


def test_a_commit_that_was_never_sent_leaves_no_files(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Workbench(lakehouse, namespace)
    bench.seeded([("a", 0)], spec=FLAT)
    x, y = bench.run(), bench.run()
    x.append([("a", 1)])
    y.append([("b", 2)])
    bench.published(x)
    folder = Path(bench.main().metadata_location.removeprefix("file://")).parent
    before = len(list(folder.iterdir()))

    def refuse(*_: Any, **__: Any) -> None:
        raise NessieUnavailable("429", status=429)

    with monkeypatch.context() as patch:
        patch.setattr(NessieClient, "commit", refuse)
        for _ in range(3):
            bench.publish(y)
    assert len(list(folder.iterdir())) == before
    bench.published(y)
