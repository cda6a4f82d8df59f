"""Days on which something dies, and the machinery that cleans up: reaper, its job, the sensor's tick."""

import os
import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster.branching.reaper import Reaping, RunState, reap
from branchlake_dagster.branching.resource import LakehouseResource
from branchlake_dagster.branching.run_branch import branch_name, main_with_history
from branchlake_dagster.branching.tables import table_metadata
from branchlake_dagster.lakehouse.embedded import process
from branchlake_dagster.lakehouse.embedded.servers import NESSIE
from branchlake_dagster.lakehouse.errors import NessieUnavailable
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.reconcile import Action
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.harness import project

pytestmark = pytest.mark.integration

FREE = table_metadata(require_checks=False)
HOUR = timedelta(hours=1)


def table(namespace: str, name: str = "t") -> dg.AssetsDefinition:
    @dg.asset(key=[namespace, name], metadata=FREE)
    def made() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    return made


# -- Nessie dies in the middle of a run ----------------------------------------------------------------


@pytest.fixture(scope="module")
def own_lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lakehouse]:
    """A lake of its own that may be killed; no Spark."""
    settings = Settings(state_dir=tmp_path_factory.mktemp("killed"), session_kind="classic")
    lake = Lakehouse(settings)
    main_with_history(lake.nessie)
    yield lake
    lake.servers.down()


def kill(lake: Lakehouse) -> None:
    record = lake.servers.status()[NESSIE]
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    while record.alive():
        process._reap_child(record.pid)


def killing(lake: Lakehouse, namespace: str, first: dg.AssetsDefinition) -> dg.AssetsDefinition:
    @dg.asset(key=[namespace, "second"], deps=[first], metadata=FREE)
    def second() -> pl.DataFrame:
        kill(lake)
        return pl.DataFrame({"n": [2]})

    return second


def test_a_run_fails_clearly_when_a_remote_nessie_dies_under_it(own_lake: Lakehouse, namespace: str) -> None:
    remote = Lakehouse(
        Settings(
            state_dir=own_lake.settings.state_dir,
            nessie_uri=own_lake.endpoints().nessie_uri,
            session_kind="classic",
        )
    )
    main = own_lake.nessie.reference("main").hash
    first = table(namespace, "first")
    with project(remote, first, killing(own_lake, namespace, first)) as p:
        run_id = p.run(ok=False)
        p.failed_with(NessieUnavailable)

        own_lake.endpoints()  # somebody starts it again
        assert own_lake.nessie.reference("main").hash == main
        assert branch_name(run_id) in {ref.name for ref in own_lake.nessie.references()}
        assert p.settle(run_id).action is Action.DISCARDED
        assert branch_name(run_id) not in p.branches()
        assert own_lake.nessie.reference("main").hash == main


def test_the_embedded_nessie_comes_back_under_a_run(own_lake: Lakehouse, namespace: str) -> None:
    first = table(namespace, "first")
    with project(own_lake, first, killing(own_lake, namespace, first)) as p:
        outcome = p.settle(p.run())
        assert outcome.action is Action.PUBLISHED
        assert (p.rows(namespace, "first"), p.rows(namespace, "second")) == ([{"n": 1}], [{"n": 2}])


# -- the reaper on real branches -----------------------------------------------------------------------


@pytest.fixture
def branches(lakehouse: Lakehouse, namespace: str) -> Iterator[Callable[..., str]]:
    """Make run branches of runs that Dagster never saw; only these are reaped here."""
    nessie = lakehouse.nessie

    def make(name: str, *, written: bool = True) -> str:
        branch = f"run-{namespace}-{name}"
        nessie.create_branch(branch, from_ref="main", from_hash=nessie.reference("main").hash)
        if written:
            lakehouse.catalog(branch).create_namespace(f"{namespace}_{name}")
        return branch

    yield make
    for ref in list(nessie.references()):
        if ref.name.startswith(f"run-{namespace}"):
            nessie.delete_branch(ref.name, expected_hash=ref.hash)


def reaped(
    lake: Lakehouse,
    namespace: str,
    *,
    later: timedelta,
    state_of: Callable[[str], RunState] = lambda _: RunState.MISSING,
    dry_run: bool = False,
) -> dict[str, Reaping]:
    found = reap(
        lake.nessie,
        listing=f"refType == 'BRANCH' && ref.name.startsWith('run-{namespace}')",
        state_of=lambda run_id: (state_of(run_id), None),
        now=datetime.now(UTC) + later,
        max_age=6 * HOUR,
        orphan_grace=HOUR,
        dry_run=dry_run,
    )
    return {one.branch.rpartition("-")[2]: one for one in found}


def left(lake: Lakehouse, namespace: str) -> set[str]:
    names = {ref.name for ref in lake.nessie.references()}
    return {name.rpartition("-")[2] for name in names if name.startswith(f"run-{namespace}")}


def test_an_orphan_is_reaped_after_its_grace(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str]
) -> None:
    branches("orphan")
    branches("untouched", written=False)
    early = reaped(lakehouse, namespace, later=timedelta(minutes=5))
    assert not early["orphan"].delete
    assert "a short while ago" in early["orphan"].reason
    dry = reaped(lakehouse, namespace, later=2 * HOUR, dry_run=True)
    assert dry["orphan"].delete
    assert left(lakehouse, namespace) == {"orphan", "untouched"}
    late = reaped(lakehouse, namespace, later=2 * HOUR)
    assert str(late["orphan"]) == f"run-{namespace}-orphan: deleted, no run of that id is known"
    # Its only commit is main's: how old the branch is, nobody knows, and so it stays.
    assert "age is unknown" in late["untouched"].reason
    assert left(lakehouse, namespace) == {"untouched"}


def test_a_settled_branch_goes_at_once_and_one_at_work_stays(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str]
) -> None:
    states = {"settled": RunState.SETTLED, "waits": RunState.AWAITING_PUBLICATION, "works": RunState.ACTIVE}
    for name in states:
        branches(name)
    found = reaped(
        lakehouse, namespace, later=timedelta(0), state_of=lambda run_id: states[run_id.rpartition("-")[2]]
    )
    assert {name for name, one in found.items() if one.delete} == {"settled"}
    assert left(lakehouse, namespace) == {"waits", "works"}


def test_a_branch_that_is_written_to_meanwhile_stays(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str]
) -> None:
    branch = branches("busy")

    def state_of(_: str) -> RunState:
        lakehouse.catalog(branch).create_namespace(f"{namespace}_late")
        return RunState.MISSING

    found = reaped(lakehouse, namespace, later=2 * HOUR, state_of=state_of)
    assert (found["busy"].delete, found["busy"].reason) == (False, "it was written to while we looked")
    assert left(lakehouse, namespace) == {"busy"}


def test_the_reap_job_deletes_what_was_missed_and_says_so(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str]
) -> None:
    orphan = branches("fresh")
    first = table(namespace)

    @dg.asset(key=[namespace, "boom"], deps=[first])
    def boom() -> None:
        raise RuntimeError("no")

    with project(lakehouse, first, boom) as p:
        missed = branch_name(p.run(ok=False))
        done = p.definitions.resolve_job_def("reap_branches").execute_in_process(instance=p.instance)
        assert done.success
        (output,) = [e for e in done.all_events if e.is_successful_output]
        told = {key: value.value for key, value in output.step_output_data.metadata.items()}
        assert told["deleted"] >= 1
        assert f"- {missed}: deleted, its run is settled" in told["branches"]
        assert f"- {orphan}: kept, no run of that id is known" in told["branches"]
        assert missed not in p.branches()
        assert orphan in p.branches()


# -- the sensor's tick ---------------------------------------------------------------------------------


def test_a_tick_publishes_and_tells_what_it_did(lakehouse: Lakehouse, namespace: str) -> None:
    settings = lakehouse.settings.model_dump(exclude_unset=True, mode="json")

    @dg.asset(key=[namespace, "bare"])
    def bare() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    with project(lakehouse, table(namespace), bare) as p:
        repository = p.definitions.get_repository_def()
        sensor = repository.get_sensor_def("publication_sensor")

        def tick() -> str:
            with dg.build_sensor_context(
                instance=p.instance,
                repository_def=repository,
                resources={"lakehouse": LakehouseResource(settings=settings)},
            ) as context:
                data = sensor.evaluate_tick(context)
            assert not data.run_requests
            return data.skip_message or ""

        good = p.run(dg.AssetKey([namespace, "t"]))
        bad = p.run(dg.AssetKey([namespace, "bare"]))
        told = tick()
        assert f"{branch_name(good)}: published, {namespace}.t as " in told
        assert f"{branch_name(bad)}: blocked, " in told
        assert "has no check" in told
        assert p.rows(namespace, "t") == [{"n": 1}]
        assert {branch_name(good), branch_name(bad)}.isdisjoint(p.branches())
        again = tick()
        assert branch_name(good) not in again
        assert branch_name(bad) not in again
