"""Exclusive assets on real Iceberg tables: one writer at a time, and a refusal by the commit itself."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import Namespace
from branchlake_dagster.publication.ledger import Published, Refused
from branchlake_dagster.runs.heartbeats import Heartbeat
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.leases import HolderWatch, Lease, RunLeases, lease_key, lease_keys
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.run_tags import RunLocation, RunState
from branchlake_dagster.tables.errors import LeaseHeld, LeaseLost
from branchlake_dagster.tables.specification import parse_exclusive_name, table_metadata
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.publication.workbench import Run, Workbench
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.raised import raising

lakehouse = memory.lakehouse


class Runs:
    """Dagster's instance, as far as a lease asks it."""

    def __init__(self) -> None:
        self.ended: set[str] = set()

    def get_run_by_id(self, run_id: str) -> SimpleNamespace:
        failed = dg.DagsterRunStatus.FAILURE
        return SimpleNamespace(
            is_finished=run_id in self.ended, is_success=False, status=failed, tags={}, run_id=run_id
        )


def leases(
    lake: Lakehouse, runs: Runs, run_id: str, *names: str, wait_s: float = 60.0, interval_s: float = 0.05
) -> RunLeases:
    return RunLeases(
        lambda: lake.nessie,
        runs,
        run_id,
        lambda: names,
        tuple,
        interval_s=interval_s,
        wait_s=wait_s,
        log_info=lambda _: None,
    )


def lease(lake: Lakehouse, name: str, ref: str = MAIN) -> Lease:
    return Lease.from_contents(name, lake.nessie.contents(ref, lease_keys([name])))


@pytest.mark.parametrize("name", ["", "a b", "a.b", "x" * 65, 7, ["a"]])
def test_what_is_no_name_is_refused(name: object) -> None:
    with raising(ConfigurationError, table="t", reason="exclusive_name", subject=repr(name)):
        parse_exclusive_name({"branchlake/exclusive": name}, "t")


def test_a_lease_that_nobody_has_is_granted_with_growing_tokens(lakehouse: Lakehouse, namespace: str) -> None:
    runs = Runs()
    assert lease(lakehouse, namespace) == Lease(namespace)
    for token in (1, 2, 3):
        leases(lakehouse, runs, f"r{token}", namespace).ensure_held(None)
        leases(lakehouse, runs, f"r{token}", namespace).ensure_held(None)  # it has it
        assert lease(lakehouse, namespace) == Lease(namespace, token, run_branch_name(f"r{token}"))
        runs.ended.add(f"r{token}")


@memory.ON_BOTH
def test_many_at_once_work_one_after_the_other(lakehouse: Lakehouse, namespace: str) -> None:
    runs, at_work, seen, tokens = Runs(), [], [], []

    def work(number: int) -> None:
        run_id = f"{namespace}-{number}"
        leases(lakehouse, runs, run_id, namespace, interval_s=2.0).ensure_held(None)
        at_work.append(run_id)
        time.sleep(0.02)
        seen.append(len(at_work))
        tokens.append(lease(lakehouse, namespace).token)
        at_work.remove(run_id)
        runs.ended.add(run_id)

    # Nobody beats here, and they must not be taken for dead: each works for less than three intervals.
    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert seen == [1] * 6
    assert tokens == [1, 2, 3, 4, 5, 6]


def test_a_run_does_not_wait_for_ever(lakehouse: Lakehouse, namespace: str) -> None:
    leases(lakehouse, Runs(), "first", namespace).ensure_held(None)
    with raising(LeaseHeld, branch="run-first", run_id="second", subject=namespace):
        leases(lakehouse, Runs(), "second", namespace, wait_s=0).ensure_held(None)


def test_a_silent_holder_is_taken_over_and_hears_of_it(lakehouse: Lakehouse, namespace: str) -> None:
    runs = Runs()
    first = leases(lakehouse, runs, "first", namespace)
    first.ensure_held(None)
    base = lakehouse.nessie.reference(MAIN).hash
    first.ensure_held(RunLocation(run_branch_name("first"), base))
    leases(lakehouse, runs, "second", namespace).ensure_held(None)
    with raising(LeaseLost, "run-second", reason="silent_too_long", subject=namespace):
        first.ensure_held(RunLocation(run_branch_name("first"), base))


def test_a_lease_that_another_had_since_the_base_is_not_granted(lakehouse: Lakehouse, namespace: str) -> None:
    runs = Runs()
    base = lakehouse.nessie.reference(MAIN).hash
    leases(lakehouse, runs, "other", namespace).ensure_held(None)
    runs.ended.add("other")
    late = leases(lakehouse, runs, "late", namespace)
    with raising(LeaseLost, "run-other", reason="taken_over", subject=namespace):
        late.ensure_held(RunLocation(run_branch_name("late"), base))
    # A retry that goes on with that very run's work has read what it wrote.
    late.ensure_held(RunLocation(run_branch_name("late"), base, continues=run_branch_name("other")))
    assert lease(lakehouse, namespace).token == 2


def ready(bench: Workbench, runs: Runs) -> Run:
    """A run that holds the lease and has written."""
    setup = bench.run()
    setup.create()
    bench.published(setup)
    run_id = f"{bench.namespace}-holder"
    leases(bench.lake, runs, run_id, bench.namespace).ensure_held(None)
    base = bench.lake.nessie.reference(MAIN).hash
    run = Run(bench, run_id, base)
    bench.lake.nessie.create_branch(run.name, from_ref=MAIN, from_hash=base)
    run.append([("d", 1)])
    return run


def test_a_takeover_right_before_the_commit_is_seen_by_the_commit(
    lakehouse: Lakehouse, namespace: str
) -> None:
    """The holder stands still at the worst moment: it has planned, and has not sent its commit yet."""
    bench, runs = Workbench(lakehouse, namespace), Runs()
    run = ready(bench, runs)
    candidate = replace(run.candidate(), leases=frozenset({namespace}))

    def pause() -> None:
        if lease(lakehouse, namespace).token == 1:
            leases(lakehouse, runs, "second", namespace).ensure_held(None)

    result = bench.publisher.publish([candidate], alive=pause)[run.name]
    assert isinstance(result, Refused)
    assert result.codes == ("lease_taken_over",)
    assert result.runs == ("second",)
    table = lakehouse.catalog(MAIN).load_table((namespace, "t"))
    assert table.scan().to_arrow().num_rows == 0


def test_a_holder_is_published_and_a_run_that_never_held_it_is_not(
    lakehouse: Lakehouse, namespace: str
) -> None:
    bench = Workbench(lakehouse, namespace)
    run = ready(bench, Runs())
    held = replace(run.candidate(), leases=frozenset({namespace}))
    never = replace(held, leases=frozenset({f"{namespace}-other"}))
    refused = bench.publisher.publish([never])[run.name]
    assert isinstance(refused, Refused)
    assert refused.codes == ("lease_not_granted",)
    assert isinstance(bench.publisher.publish([held])[run.name], Published)


def counter(namespace: str, folder: dict[str, object]) -> dg.AssetsDefinition:
    """Adds one to what `main` has: two that read the same number would lose one."""

    @dg.asset(key=[namespace, "counter"], metadata=table_metadata(require_checks=False, exclusive=namespace))
    def made(lakehouse: LakehouseResource) -> pl.DataFrame:
        catalog = lakehouse.catalog()
        name = (namespace, "counter")
        before = (
            catalog.load_table(name).scan().to_arrow()["n"][0].as_py() if catalog.table_exists(name) else 0
        )
        if folder.pop("fails", False):
            raise ValueError("as asked")
        return pl.DataFrame({"n": [before + 1]})

    return made


def counted(p: Project, namespace: str) -> int:
    return int(p.rows(namespace, "counter")[0]["n"])


def test_runs_of_an_exclusive_asset(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRANCHLAKE_EXCLUSIVE_WAIT_S", "0")
    asked: dict[str, object] = {}
    with project(lakehouse, counter(namespace, asked)) as p:
        first = p.run()
        # It has passed and waits for its publication: that is no silence, however long.
        p.run(ok=False)
        p.failed_with(LeaseHeld, f"run-{first} holds")
        assert p.settle(first).state is RunState.PUBLISHED
        # What was published is free, and so is what has failed.
        assert p.settle(p.run()).state is RunState.PUBLISHED
        asked["fails"] = True
        p.run(ok=False)
        assert p.settle(p.run()).state is RunState.PUBLISHED
        assert counted(p, namespace) == 3
        # Six grants are four too many for three rows: the failed ones count as well, but not the one that waited.
        assert lease(lakehouse, namespace).token == 4


def test_a_lease_is_held_from_the_first_access_in_a_thread_of_the_asset(
    lakehouse: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRANCHLAKE_EXCLUSIVE_WAIT_S", "0")

    tokens: list[int] = []

    @dg.asset(key=[namespace, "counter"], metadata=table_metadata(require_checks=False, exclusive=namespace))
    def counted_in_pool(lakehouse: LakehouseResource) -> pl.DataFrame:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lakehouse.catalog).result()
        tokens.append(lease(lakehouse.lakehouse, namespace).token)
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, counted_in_pool) as p:
        first = p.run()
        p.run(ok=False)
        p.failed_with(LeaseHeld)
        assert tokens == [1]
        assert p.settle(first).state is RunState.PUBLISHED


def test_a_run_that_lost_its_lease_after_its_end_is_refused(lakehouse: Lakehouse, namespace: str) -> None:
    with project(lakehouse, counter(namespace, {})) as p:
        first = p.run()
        # As a foreign instance would, that does not know the run and hears nothing of it.
        leases(lakehouse, SimpleNamespace(get_run_by_id=lambda _: None), "x", namespace).ensure_held(None)
        refused = p.settle(first)
        assert refused.state is RunState.REFUSED
        assert refused.codes == ("lease_taken_over",)
        assert "run-x" in refused.detail
        assert not lakehouse.catalog(MAIN).table_exists((namespace, "counter"))


def test_no_hand_makes_a_lease_unreadable(lakehouse: Lakehouse, namespace: str) -> None:
    broken = {lease_key(namespace): Namespace("id", ("branchlake",), {"branchlake.fencing_token": "many"})}
    assert Lease.from_contents(namespace, broken) == Lease(namespace)


def test_a_holder_that_beats_is_not_gone_and_a_pause_of_the_asker_is_no_silence() -> None:
    now, counter = [0.0], [0]

    def beats() -> list[Heartbeat]:
        beat = Heartbeat("run-a", "w", "a", interval_s=10.0, text=str(counter[0]))
        return [beat, Heartbeat("run-b", "w", "b", text=str(now[0]))]

    watch = HolderWatch(
        "run-a",
        None,
        SimpleNamespace(get_run_by_id=lambda _: None),
        beats,
        interval_s=1.0,
        monotonic=lambda: now[0],
    )

    def look(after_s: float, *, beat: bool = False) -> str | None:
        now[0] += after_s
        counter[0] += beat
        return watch.gone_reason()

    assert [look(9.0, beat=True) for _ in range(20)] == [None] * 20
    # The asker stood still for an hour and looks twice: that says nothing of the holder.
    assert look(3600.0) is None
    assert look(0.1) is None
    assert look(0.1, beat=True) is None
    # Silent for 29 s; then for 30.
    assert [look(29.0 / 6) for _ in range(6)] == [None] * 6
    assert look(1.0) == "it was silent for 30 s"


@pytest.mark.parametrize("has_branch", [True, False])
def test_a_holder_of_another_instance_is_gone_at_once_only_without_branch(
    lakehouse: Lakehouse, has_branch: bool
) -> None:
    now = [0.0]
    if has_branch:
        head = lakehouse.nessie.reference(MAIN).hash
        lakehouse.nessie.create_branch("run-elsewhere", from_ref=MAIN, from_hash=head)
    watch = HolderWatch(
        "run-elsewhere",
        lakehouse.nessie,
        SimpleNamespace(get_run_by_id=lambda _: None),
        tuple,
        interval_s=10.0,
        monotonic=lambda: now[0],
    )

    def look(after_s: float) -> bool:
        now[0] += after_s
        return watch.gone_reason() is not None

    assert [look(1.0) for _ in range(7)] == [False] * 6 + [not has_branch]
    assert [look(4.0) for _ in range(6)] == [not has_branch] * 5 + [True]
