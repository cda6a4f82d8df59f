"""Days on which something dies, and the machinery that cleans up: reaper, its job, the sensor's tick."""

import itertools
import os
import signal
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster.cleanup.jobs import (
    NotOurs,
    RunsUnreadable,
    end_named_refs,
    reap_branches,
    sweep_discarded,
)
from branchlake_dagster.cleanup.reaper import Reaper
from branchlake_dagster.cleanup.reaper_rules import BranchOwner, Limits, OwnerState, Reaping, ReapingAction
from branchlake_dagster.embedded import process
from branchlake_dagster.embedded.servers import NESSIE
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieUnavailable
from branchlake_dagster.nessie.model import Reference, ReferenceType
from branchlake_dagster.runs.branch_owner import BranchOrigin, Maker, OriginFinder, load_instance_id
from branchlake_dagster.runs.discarding import claim_branch, discard_branch
from branchlake_dagster.runs.heartbeats import Heartbeat, HeartbeatStore, HeartbeatsUnreadable
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_branch import ensure_main_has_commit, run_branch_name, run_id_of_branch
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster.tables.table_files import TableFiles
from branchlake_dagster.waiting import holds_within
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.raised import raising

lakehouse = memory.lakehouse

FREE = table_metadata(require_checks=False)
HOUR = timedelta(hours=1)
LIMITS = Limits(6 * HOUR, HOUR)
HERE, THERE = "here", "there"
"""This Dagster instance, and another one on the same lake."""


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
    ensure_main_has_commit(lake.nessie)
    yield lake
    lake.servers.stop_all()


def kill(lake: Lakehouse) -> None:
    record = lake.servers.status()[NESSIE]
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    while record.is_alive():
        process._reap_child(record.pid)


def killing(lake: Lakehouse, namespace: str, first: dg.AssetsDefinition) -> dg.AssetsDefinition:
    @dg.asset(key=[namespace, "second"], deps=[first], metadata=FREE)
    def second() -> pl.DataFrame:
        kill(lake)
        return pl.DataFrame({"n": [2]})

    return second


@pytest.mark.nessie
def test_a_run_fails_clearly_when_a_remote_nessie_dies_under_it(
    own_lake: Lakehouse, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Lakehouse(
        Settings(
            state_dir=own_lake.settings.state_dir,
            nessie_uri=own_lake.endpoints().nessie_uri,
            session_kind="classic",
        )
    )
    client = remote.nessie
    # Each step and each end of the run repeats its requests, and waits for seconds in between.
    monkeypatch.setattr(client, "_retry", replace(client._retry, delays_s=(0.1, 0.2, 0.4)))
    main = own_lake.nessie.reference("main").hash
    first = table(namespace, "first")
    with project(remote, first, killing(own_lake, namespace, first)) as p:
        run_id = p.run(ok=False)
        p.failed_with(NessieUnavailable)

        own_lake.endpoints()  # somebody starts it again
        # The breaker still refuses requests for a moment.
        assert holds_within(30, lambda: answers(own_lake), every_s=0.1)
        assert own_lake.nessie.reference("main").hash == main
        assert run_branch_name(run_id) in {ref.name for ref in own_lake.nessie.references()}
        assert p.settle(run_id).state is RunState.DISCARDED
        assert run_branch_name(run_id) not in p.branches()
        assert own_lake.nessie.reference("main").hash == main


def answers(lake: Lakehouse) -> bool:
    try:
        lake.nessie.reference("main")
    except NessieUnavailable:
        return False
    return True


@pytest.mark.nessie
def test_the_embedded_nessie_comes_back_under_a_run(own_lake: Lakehouse, namespace: str) -> None:
    first = table(namespace, "first")
    with project(own_lake, first, killing(own_lake, namespace, first)) as p:
        outcome = p.settle(p.run())
        assert outcome.state is RunState.PUBLISHED
        assert (p.rows(namespace, "first"), p.rows(namespace, "second")) == ([{"n": 1}], [{"n": 2}])


# -- the reaper on real branches -----------------------------------------------------------------------


@pytest.fixture
def branches(lakehouse: Lakehouse, namespace: str) -> Iterator[Callable[..., str]]:
    """Make run branches of runs that Dagster never saw; only these are reaped here."""
    nessie = lakehouse.nessie

    def make(name: str, *, written: bool = True, instance: str | None = HERE) -> str:
        branch = f"run-{namespace}-{name}"
        nessie.create_branch(branch, from_ref="main", from_hash=nessie.reference("main").hash)
        if written:
            told = {f"commit.property.{LakeProperty.INSTANCE}": instance} if instance else None
            lakehouse.catalog(branch, properties=told).create_namespace(f"{namespace}_{name}")
        return branch

    yield make
    for ref in list(nessie.references()):
        if f"-{namespace}" in ref.name:
            delete = nessie.delete_tag if ref.type is ReferenceType.TAG else nessie.delete_branch
            delete(ref.name, expected_hash=ref.hash)


class Silent:
    """A store without heartbeats."""

    def all(self) -> tuple[Heartbeat, ...]:
        return ()

    def remove(self, branch: str, writer: str) -> None: ...


class FakeRuns:
    """Dagster, saying of each branch what the test wants."""

    def __init__(self, state_of: Callable[[str], OwnerState | BranchOwner]) -> None:
        self.state_of = state_of
        self.buried: dict[str, str] = {}
        self.told: dict[str, str] = {}

    def owners(self, branches: Collection[str]) -> dict[str, BranchOwner]:
        found = {branch: self.state_of(run_id_of_branch(branch)) for branch in branches}
        return {
            branch: one if isinstance(one, BranchOwner) else BranchOwner(run_id_of_branch(branch), one)
            for branch, one in found.items()
        }

    def reports_after(self, run_id: str, beat: Heartbeat) -> bool:
        return False

    def report_dead(self, run_id: str, message: str) -> None:
        self.buried[run_id] = message

    def fenced(self, run_id: str, branch: str, reason: str) -> None:
        self.told[run_id] = reason


def reaped(
    lake: Lakehouse,
    namespace: str,
    *,
    later: timedelta = timedelta(0),
    state_of: Callable[[str], OwnerState | BranchOwner] = lambda _: OwnerState.MISSING,
    runs: FakeRuns | None = None,
    heartbeats: Any = None,
    limits: Limits = LIMITS,
    dry_run: bool = False,
    sleep: Callable[[float], None] = lambda _: None,
    monotonic: Callable[[], float] = lambda: 0.0,
    **more: Any,
) -> dict[str, Reaping]:
    found = Reaper(
        lake.nessie,
        runs or FakeRuns(state_of),
        limits,
        heartbeats=heartbeats or Silent(),
        now=lambda: datetime.now(UTC) + later,
        monotonic=monotonic,
        sleep=sleep,
        is_on_main=lambda *_: True,
        ref_filter=f"refType == 'BRANCH' && ref.name.contains('-{namespace}')",
        discarded_filter=f"refType == 'TAG' && ref.name.startsWith('discarded-{namespace}')",
        claim_filter=f"refType == 'TAG' && ref.name.startsWith('judged-{namespace}')",
        instance=HERE,
        **more,
    ).run(dry_run=dry_run)
    return {one.branch.rpartition("-")[2]: one for one in found}


def left(lake: Lakehouse, namespace: str) -> set[str]:
    """The branches that are there, `name*` for those that were discarded, and `name!` for claims."""
    names = {ref.name for ref in lake.nessie.references(filter=f"ref.name.contains('-{namespace}')")}
    marks = {"discarded": "*", "judged": "!"}
    return {name.rpartition("-")[2] + marks.get(name.partition("-")[0], "") for name in names}


def test_an_orphan_is_reaped_after_its_grace(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str]
) -> None:
    branches("orphan")
    branches("untouched", written=False)
    early = reaped(lakehouse, namespace, later=timedelta(minutes=5))
    assert not early["orphan"].deletes_branch
    assert early["orphan"].reason.code == "written_recently"
    dry = reaped(lakehouse, namespace, later=2 * HOUR, dry_run=True)
    assert dry["orphan"].deletes_branch
    assert left(lakehouse, namespace) == {"orphan", "untouched"}
    late = reaped(lakehouse, namespace, later=2 * HOUR)
    assert str(late["orphan"]).startswith(
        f"run-{namespace}-orphan: discarded, no run of that id is known any more to the Dagster instance"
    )
    # Its only commit is main's: how old the branch is, nobody knows, and so it stays.
    assert late["untouched"].reason.code == "age_unknown"
    assert left(lakehouse, namespace) == {"orphan*", "untouched"}


def test_what_has_ended_goes_at_once_and_what_works_or_waits_stays(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str]
) -> None:
    states = {
        "failed": OwnerState.UNPUBLISHED,
        "published": OwnerState.PUBLISHED,
        "waits": OwnerState.AWAITING_PUBLICATION,
        "works": OwnerState.ACTIVE,
    }
    for name in states:
        branches(name)
    found = reaped(lakehouse, namespace, state_of=lambda run_id: states[run_id.rpartition("-")[2]])
    assert {name: one.action for name, one in found.items()} == {
        "failed": ReapingAction.DISCARD,
        "published": ReapingAction.DELETE,
        "waits": ReapingAction.KEEP,
        "works": ReapingAction.KEEP,
    }
    assert left(lakehouse, namespace) == {"failed*", "waits", "works"}


def test_a_branch_that_is_written_to_meanwhile_stays(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str]
) -> None:
    branch = branches("busy")

    def state_of(_: str) -> OwnerState:
        lakehouse.catalog(branch).create_namespace(f"{namespace}_late")
        return OwnerState.MISSING

    found = reaped(lakehouse, namespace, later=2 * HOUR, state_of=state_of)
    assert (found["busy"].deletes_branch, found["busy"].reason.code) == (False, "written_meanwhile")
    assert left(lakehouse, namespace) == {"busy"}


def test_a_failed_run_is_kept_for_debugging_from_its_end(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str]
) -> None:
    ended = {"old": 3 * HOUR, "young": HOUR}
    for name in ended:
        branches(name)

    def state_of(run_id: str) -> BranchOwner:
        since = ended[run_id.rpartition("-")[2]]
        return BranchOwner(run_id, OwnerState.UNPUBLISHED, ended_at=datetime.now(UTC) - since)

    limits = Limits(6 * HOUR, HOUR, keep_failed=2 * HOUR)
    found = reaped(lakehouse, namespace, state_of=state_of, limits=limits)
    assert found["young"].reason.code == "kept_for_debugging"
    assert "1.0 h" in found["young"].reason
    assert left(lakehouse, namespace) == {"old*", "young"}


def test_a_publication_branch_goes_with_the_one_it_is_for(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str]
) -> None:
    branches("waits")
    nessie = lakehouse.nessie
    for name in ("waits", "gone"):
        head = nessie.reference("main").hash
        nessie.create_branch(f"publish-{namespace}-{name}", from_ref="main", from_hash=head)
    reaped(lakehouse, namespace, state_of=lambda _: OwnerState.AWAITING_PUBLICATION)
    names = {ref.name for ref in nessie.references(filter=f"ref.name.contains('-{namespace}')")}
    assert names == {f"run-{namespace}-waits", f"publish-{namespace}-waits"}


# -- nothing is deleted when something cannot be asked ------------------------------------------------


class BrokenError(Exception):
    pass


def test_references_of_a_person_are_ignored(lakehouse: Lakehouse, namespace: str) -> None:
    """`publish-q3-report` was deleted at once, and `discarded-v1.0-release` would have been swept."""
    nessie = lakehouse.nessie
    head = nessie.reference("main").hash
    own = {f"publish-q3-{namespace}", f"run-experiment-{namespace}"}
    kept = {f"discarded-v1.0-{namespace}", f"judged-{namespace}", f"sweeping-{namespace}"}
    for name in own:
        nessie.create_branch(name, from_ref="main", from_hash=head)
    for name in kept:
        nessie.create_tag(name, from_ref="main", from_hash=head)
    late = datetime.now(UTC) + 100 * HOUR
    with project(lakehouse, table(namespace)) as p:
        told = [*map(str, reap_branches(lakehouse, p.instance, dry_run=True, now=lambda: late))]
        told += map(str, sweep_discarded(lakehouse, p.instance, dry_run=True, now=lambda: late))
        assert not [line for line in told if namespace in line]
        assert not [one for one in p.reconciler().reconcile_branches() if namespace in one.branch]
        with raising(NotOurs, branch=f"run-experiment-{namespace}"):
            end_named_refs(lakehouse, p.instance, [f"run-experiment-{namespace}"])
    for name in own:
        nessie.delete_branch(name, expected_hash=nessie.reference(name).hash)
    for name in kept:
        nessie.delete_tag(name, expected_hash=nessie.reference(name).hash)


def test_nothing_is_deleted_when_dagster_does_not_answer(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str]
) -> None:
    table_of = table(namespace)
    with project(lakehouse, table_of) as p:
        orphan = run_branch_name(p.run())
        real = type(p.instance).get_run_records

        def failing(self: dg.DagsterInstance, *args: Any, **kwargs: Any) -> Any:
            raise BrokenError("password=secret")

        with patch.object(type(p.instance), "get_run_records", failing):
            late = datetime.now(UTC) + 24 * HOUR
            with pytest.raises(RunsUnreadable) as caught:
                list(reap_branches(lakehouse, p.instance, now=lambda: late))
        assert "secret" not in str(caught.value)
        assert type(p.instance).get_run_records is real
        assert orphan in p.branches()
        p.settle(run_id_of_branch(orphan))


def test_nothing_is_deleted_when_a_page_of_branches_is_missing(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str]
) -> None:
    for name in ("first", "second", "third"):
        branches(name)
    real = NessieClient.references

    def failing(self: NessieClient, **options: Any) -> Iterator[Reference]:
        yield from itertools.islice(real(self, **options), 2)
        raise NessieUnavailable("the second page is missing")

    with patch.object(NessieClient, "references", failing), pytest.raises(NessieUnavailable):
        reaped(lakehouse, namespace, later=2 * HOUR)
    assert left(lakehouse, namespace) == {"first", "second", "third"}


def test_nothing_is_deleted_when_the_heartbeats_cannot_be_read(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str], tmp_path: Path
) -> None:
    branches("orphan")
    (tmp_path / "_branchlake").mkdir()
    (tmp_path / "_branchlake" / "heartbeats").write_text("no folder")
    with pytest.raises(HeartbeatsUnreadable):
        reaped(lakehouse, namespace, later=2 * HOUR, heartbeats=HeartbeatStore(f"file://{tmp_path}"))
    assert left(lakehouse, namespace) == {"orphan"}


# -- heartbeats and the reaper --------------------------------------------------------------------------


class Beating:
    """Heartbeat files of writers that the test lets beat, and a clock that moves by sleeping."""

    def __init__(self, folder: Path, namespace: str) -> None:
        self.store = HeartbeatStore(f"file://{folder}")
        self.namespace = namespace
        self.seconds = 0.0
        self.alive: list[Heartbeat] = []

    def beat(
        self,
        name: str,
        *,
        age: timedelta = timedelta(0),
        kind: Any = "run",
        alive: bool = False,
        instance: str = "",
    ) -> None:
        branch = name if name.startswith("publish-") else f"run-{self.namespace}-{name}"
        beat = Heartbeat(
            branch,
            f"host-1-{kind}",
            run_id_of_branch(branch),
            kind,
            counter=1,
            written_at=datetime.now(UTC) - age,
            pid=1,
            host="host",
            instance=instance,
        )
        self.store.write(beat)
        if alive:
            self.alive.append(beat)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.alive = [replace(beat, counter=beat.counter + 1) for beat in self.alive]
        for beat in self.alive:
            self.store.write(beat)

    def reaped(self, lake: Lakehouse, runs: FakeRuns, **options: Any) -> dict[str, Reaping]:
        return reaped(
            lake,
            self.namespace,
            runs=runs,
            heartbeats=self.store,
            monotonic=lambda: self.seconds,
            sleep=self.sleep,
            **options,
        )


@pytest.fixture
def beating(tmp_path: Path, namespace: str) -> Beating:
    return Beating(tmp_path, namespace)


def test_a_dead_writers_run_is_ended_and_a_live_one_is_left_alone(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str], beating: Beating
) -> None:
    """Clocks may differ by hours: what counts is whether the file changes while it is watched."""
    for name in ("dead", "alive", "skewed", "old", "never"):
        branches(name)
    beating.beat("dead", age=timedelta(minutes=5))
    beating.beat("alive", alive=True)
    beating.beat("skewed", age=3 * HOUR, alive=True)
    beating.beat("old", age=timedelta(0), alive=True)
    runs = FakeRuns(lambda run_id: BranchOwner(run_id, OwnerState.ACTIVE, datetime.now(UTC) - 20 * HOUR))
    dry = beating.reaped(lakehouse, runs, dry_run=True)
    assert beating.seconds == 0
    assert {name: one.heartbeat for name, one in dry.items()} == {
        "dead": "silent, not watched yet",
        "alive": "beating",
        "skewed": "silent, not watched yet",
        "old": "beating",
        "never": "none",
    }
    assert not any(one.deletes_branch for one in dry.values())
    found = beating.reaped(lakehouse, runs)
    assert beating.seconds == 30
    assert {name for name, one in found.items() if one.deletes_branch} == {"dead"}
    assert left(lakehouse, namespace) == {"dead*", "alive", "skewed", "old", "never"}
    assert list(runs.buried) == [f"{namespace}-dead"]
    assert "no heartbeat of process 1 on host for 30 s" in runs.buried[f"{namespace}-dead"]
    assert {beat.branch.rpartition("-")[2] for beat in beating.store.all()} == {"alive", "skewed", "old"}


def test_a_live_heartbeat_protects_past_six_hours(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str], beating: Beating
) -> None:
    branches("long")
    branches("never")
    # Written by a clock that agrees with the reaper's.
    beating.beat("long", age=-7 * HOUR)
    runs = FakeRuns(lambda run_id: BranchOwner(run_id, OwnerState.ACTIVE))
    found = beating.reaped(lakehouse, runs, later=7 * HOUR)
    assert found["long"].reason.code == "writer_alive"
    assert found["never"].reason.code == "no_sign_of_life"
    assert "7.0 h" in found["never"].reason
    assert left(lakehouse, namespace) == {"long", "never*"}
    assert runs.buried == {}  # it never beat: nobody can say that its process is dead


def test_a_publication_in_progress_is_never_reaped(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str], beating: Beating
) -> None:
    for name in ("publishing", "crashed"):
        branches(name)
        beating.beat(name, kind="publisher", age=HOUR, alive=name == "publishing")
    found = beating.reaped(lakehouse, FakeRuns(lambda _: OwnerState.UNPUBLISHED), later=24 * HOUR)
    assert found["publishing"].reason.code == "being_published"
    assert left(lakehouse, namespace) == {"publishing", "crashed*"}


@pytest.mark.parametrize("claimed", [True, False])
def test_a_run_that_died_while_it_published_itself_is_left_to_the_next_publisher(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str], beating: Beating, claimed: bool
) -> None:
    branch = branches("inside")
    nessie = lakehouse.nessie
    if claimed:
        claim_branch(nessie, nessie.reference(branch))
    beating.beat("inside", kind="publisher", age=HOUR)
    runs = FakeRuns(lambda _: OwnerState.ACTIVE)
    found = beating.reaped(lakehouse, runs)
    assert list(runs.buried) == [f"{namespace}-inside"]
    assert left(lakehouse, namespace) == ({"inside", "inside!"} if claimed else {"inside*"})
    # Dagster knows now that it ended; nothing of it goes before the publisher has told.
    runs.state_of = lambda _: OwnerState.UNPUBLISHED
    found = beating.reaped(lakehouse, runs)
    if claimed:
        assert found["inside"].reason.code == "claimed"
        told = BranchOwner(f"{namespace}-inside", OwnerState.PUBLISHED, has_verdict=True)
        runs.state_of = lambda _: told
        beating.reaped(lakehouse, runs)
        assert left(lakehouse, namespace) == set()


def test_a_run_that_begins_to_publish_itself_while_the_reaper_looks_is_left_to_the_next_publisher(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str]
) -> None:
    """It was claimed, merged and dead between the reaper's two questions: `main` may have it."""
    branch = lakehouse.nessie.reference(branches("quick"))

    def state_of(_: str) -> OwnerState:
        claim_branch(lakehouse.nessie, branch)
        return OwnerState.UNPUBLISHED

    found = reaped(lakehouse, namespace, state_of=state_of)
    assert found["quick"].reason.code == "claimed"
    assert left(lakehouse, namespace) == {"quick", "quick!"}


def test_a_claim_without_its_branch_is_deleted(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str]
) -> None:
    branch = branches("waits")
    nessie = lakehouse.nessie
    claim_branch(nessie, nessie.reference(branch))
    claim_branch(nessie, replace(nessie.reference(branch), name=f"run-{namespace}-gone"))
    dry = reaped(lakehouse, namespace, state_of=lambda _: OwnerState.AWAITING_PUBLICATION, dry_run=True)
    assert dry["waits"].action is ReapingAction.KEEP
    assert left(lakehouse, namespace) == {"waits", "waits!", "gone!"}
    reaped(lakehouse, namespace, state_of=lambda _: OwnerState.AWAITING_PUBLICATION)
    assert left(lakehouse, namespace) == {"waits", "waits!"}


def test_a_run_that_passes_in_the_moment_it_is_fenced_gets_its_branch_back(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str], beating: Beating
) -> None:
    """The writer stood still while it was watched, woke up and had nothing more to write."""
    branch = branches("awake")
    head = lakehouse.nessie.reference(branch).hash
    beating.beat("awake", age=timedelta(minutes=5))
    runs = FakeRuns(lambda run_id: BranchOwner(run_id, OwnerState.ACTIVE, datetime.now(UTC)))
    told: list[OwnerState] = []

    def state_of(run_id: str) -> OwnerState:
        told.append(OwnerState.AWAITING_PUBLICATION if told else OwnerState.ACTIVE)
        return told[-1]

    runs.state_of = state_of
    found = beating.reaped(lakehouse, runs)
    assert (found["awake"].action, found["awake"].deletes_branch) == (ReapingAction.RESTORE, False)
    assert left(lakehouse, namespace) == {"awake"}
    assert lakehouse.nessie.reference(branch).hash == head


@pytest.mark.parametrize(
    ("owner", "claimed", "back"),
    [
        (BranchOwner("r", OwnerState.AWAITING_PUBLICATION), False, True),
        # Whoever has it in hand ends it: a publisher between the fence and its word, or a retry.
        (BranchOwner("r", OwnerState.AWAITING_PUBLICATION), True, False),
        (BranchOwner("r", OwnerState.AWAITING_PUBLICATION, is_continued=True), False, False),
        (BranchOwner("r", OwnerState.ACTIVE), False, False),
        (BranchOwner("r", OwnerState.UNPUBLISHED, has_verdict=True), False, False),
        (BranchOwner("r", OwnerState.MISSING), False, False),
    ],
)
def test_a_later_pass_restores_what_a_killed_pass_had_fenced(
    lakehouse: Lakehouse,
    namespace: str,
    branches: Callable[..., str],
    owner: BranchOwner,
    claimed: bool,
    back: bool,
) -> None:
    branch = branches("fenced")
    nessie = lakehouse.nessie
    seen = nessie.reference(branch)
    discard_branch(nessie, seen)
    if claimed:
        claim_branch(nessie, seen)
    found = reaped(lakehouse, namespace, state_of=lambda _: owner, dry_run=True)
    assert [one.action for one in found.values()] == [ReapingAction.RESTORE] * back
    assert left(lakehouse, namespace) == {"fenced*"} | ({"fenced!"} if claimed else set())
    for _ in range(2 - claimed):
        reaped(lakehouse, namespace, state_of=lambda _: owner)
    assert left(lakehouse, namespace) == ({"fenced"} if back else {"fenced*"})


def test_a_pass_over_named_branches_restores_no_others(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str]
) -> None:
    nessie = lakehouse.nessie
    for name in ("named", "other"):
        discard_branch(nessie, nessie.reference(branches(name)))
    found = reaped(
        lakehouse,
        namespace,
        state_of=lambda _: OwnerState.AWAITING_PUBLICATION,
        only=[f"run-{namespace}-named"],
        anyones=True,
    )
    assert {name: one.action for name, one in found.items()} == {"named": ReapingAction.RESTORE}
    assert left(lakehouse, namespace) == {"named", "other*"}


def test_a_later_pass_reports_a_dead_run_that_a_killed_pass_did_not_report(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str], beating: Beating
) -> None:
    branches("dead")
    beating.beat("dead", age=HOUR)
    runs = FakeRuns(lambda _: OwnerState.ACTIVE)

    def dies(run_id: str, message: str) -> None:
        raise BrokenError("killed")

    with patch.object(runs, "report_dead", dies), pytest.raises(BrokenError):
        beating.reaped(lakehouse, runs)
    assert left(lakehouse, namespace) == {"dead*"}
    beating.reaped(lakehouse, runs)
    assert list(runs.buried) == [f"{namespace}-dead"]
    assert beating.store.all() == ()


def test_a_dead_writer_that_writes_after_all_is_not_reported_as_dead(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str], beating: Beating
) -> None:
    branch = branches("late")
    beating.beat("late", age=HOUR)

    def state_of(_: str) -> OwnerState:
        lakehouse.catalog(branch).create_namespace(f"{namespace}_late_{len(written)}")
        written.append(1)
        return OwnerState.ACTIVE

    written: list[int] = []
    runs = FakeRuns(state_of)
    found = beating.reaped(lakehouse, runs)
    assert found["late"].reason.code == "written_meanwhile"
    assert runs.buried == {}
    assert left(lakehouse, namespace) == {"late"}


def test_the_reap_job_deletes_what_was_missed_and_says_so(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str]
) -> None:
    orphan = f"run-{uuid.uuid4()}"
    lakehouse.nessie.create_branch(orphan, from_ref="main", from_hash=lakehouse.nessie.reference("main").hash)
    first = table(namespace)

    @dg.asset(key=[namespace, "boom"], deps=[first])
    def boom() -> None:
        raise RuntimeError("no")

    with project(lakehouse, first, boom) as p:
        missed = run_branch_name(p.run(ok=False))
        done = p.definitions.resolve_job_def("reap_branches").execute_in_process(instance=p.instance)
        assert done.success
        (output,) = [e for e in done.all_events if e.is_successful_output]
        told = {key: value.value for key, value in output.step_output_data.metadata.items()}
        assert told["deleted"] >= 1
        assert f"- {missed}: discarded, its run has failed, so it is not published" in told["branches"]
        assert f"- {orphan}: kept, no run of that id is known" in told["branches"]
        assert missed not in p.branches()
        assert orphan in p.branches()
    lakehouse.nessie.delete_branch(orphan, expected_hash=lakehouse.nessie.reference(orphan).hash)


# -- the sensor's tick ---------------------------------------------------------------------------------


def test_a_tick_publishes_and_reports_its_publications(lakehouse: Lakehouse, namespace: str) -> None:

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
                resources={"lakehouse": LakehouseResource.from_settings(lakehouse.settings)},
            ) as context:
                data = sensor.evaluate_tick(context)
            assert not data.run_requests
            return data.skip_message or ""

        good = p.run(dg.AssetKey([namespace, "t"]))
        bad = p.run(dg.AssetKey([namespace, "bare"]))
        told = tick()
        assert f"{run_branch_name(good)}: published, {namespace}.t as " in told
        assert f"{run_branch_name(bad)}: blocked, " in told
        assert "has no check" in told
        assert p.rows(namespace, "t") == [{"n": 1}]
        assert {run_branch_name(good), run_branch_name(bad)}.isdisjoint(p.branches())
        again = tick()
        assert run_branch_name(good) not in again
        assert run_branch_name(bad) not in again


# -- whose branch ---------------------------------------------------------------------------------------


def test_another_instances_branch_is_left_alone_until_a_person_names_it(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str]
) -> None:
    branches("theirs", instance=THERE)
    branches("nobodys", instance=None)
    branches("ours")
    claim_branch(lakehouse.nessie, lakehouse.nessie.reference(branches("claimed", instance=THERE)))
    gone = lakehouse.nessie.reference(f"run-{namespace}-claimed")
    lakehouse.nessie.delete_branch(gone.name, expected_hash=gone.hash)
    found = reaped(lakehouse, namespace, later=1000 * HOUR)
    assert (found["theirs"].action, found["theirs"].instance) == (ReapingAction.KEEP, THERE)
    assert found["theirs"].reason.code == "made_elsewhere"
    assert found["nobodys"].reason.code == "maker_unknown"
    assert left(lakehouse, namespace) == {"theirs", "nobodys", "ours*", "claimed!"}
    theirs = f"run-{namespace}-theirs"
    early = reaped(lakehouse, namespace, only=[theirs], anyones=True)
    assert early["theirs"].reason.code == "written_recently"
    reaped(lakehouse, namespace, later=2 * HOUR, only=[theirs], anyones=True)
    assert left(lakehouse, namespace) == {"theirs*", "nobodys", "ours*", "claimed!"}


def test_a_person_does_not_end_what_beats(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str], beating: Beating
) -> None:
    branches("theirs", instance=THERE)
    branches("other", instance=THERE)
    beating.beat("theirs", age=HOUR, alive=True)
    beating.beat("other", age=HOUR)
    runs = FakeRuns(lambda _: OwnerState.MISSING)
    only = {"only": [f"run-{namespace}-theirs"], "anyones": True, "later": 24 * HOUR}
    assert beating.reaped(lakehouse, runs, **only)["theirs"].reason.code == "writer_alive"
    assert left(lakehouse, namespace) == {"theirs", "other"}
    assert len(beating.store.all()) == 2


def test_another_instances_dead_writer_is_left_to_its_own_reaper(
    lakehouse: Lakehouse, namespace: str, branches: Callable[..., str], beating: Beating
) -> None:
    """Its run must be told to its own Dagster, which finds it by its heartbeat."""
    branches("theirs", instance=None)
    beating.beat("theirs", age=HOUR, instance=THERE)
    found = beating.reaped(lakehouse, FakeRuns(lambda _: OwnerState.MISSING), later=24 * HOUR)
    assert (found["theirs"].action, found["theirs"].instance) == (ReapingAction.KEEP, THERE)
    assert beating.seconds == 0
    assert len(beating.store.all()) == 1


@pytest.mark.spark
def test_what_spark_alone_wrote_says_whose_it_is(lakehouse: Lakehouse, namespace: str) -> None:
    """Spark overwrites its catalogue's app-id and user, so its commits cannot name the instance."""

    @dg.asset(key=[namespace, "s"], metadata=FREE)
    def made(context: dg.AssetExecutionContext, spark: BranchSparkResource) -> None:
        session = spark.spark_session
        session.sql(f"create namespace nessie.{namespace}")
        session.sql(f"create table nessie.{namespace}.sql using iceberg as select 1 as n")

    with project(lakehouse, made) as p:
        run_id = p.run()
        here = load_instance_id(p.instance)
        ref = lakehouse.nessie.reference(run_branch_name(run_id), fetch_metadata=True)
        files = TableFiles(lakehouse.settings.file_io_properties())
        assert OriginFinder(lakehouse.nessie, here, files).find_origin(ref) == BranchOrigin(
            Maker.HERE, (here or "",)
        )
        assert OriginFinder(lakehouse.nessie, "another", files).find_origin(ref).maker is Maker.ELSEWHERE
        p.settle(run_id)


def test_the_runs_of_a_deleted_record_are_reaped_by_their_own_instance_only(
    lakehouse: Lakehouse, namespace: str
) -> None:
    late = datetime.now(UTC) + 10 * HOUR
    with project(lakehouse, table(namespace)) as p, project(lakehouse, table(namespace)) as q:
        run_id = p.run()
        branch = run_branch_name(run_id)

        def look(instance: dg.DagsterInstance) -> Reaping:
            found = reap_branches(lakehouse, instance, dry_run=True, now=lambda: late)
            return next(one for one in found if one.branch == branch)

        assert look(p.instance).reason.code == "awaiting_publication"
        assert look(q.instance).instance == load_instance_id(p.instance)
        p.instance.delete_run(run_id)
        assert look(p.instance).action is ReapingAction.DISCARD
        kept = look(q.instance)
        assert (kept.action, kept.instance) == (ReapingAction.KEEP, load_instance_id(p.instance))
    ref = lakehouse.nessie.reference(branch)
    lakehouse.nessie.delete_branch(branch, expected_hash=ref.hash)
