"""The branches of live ingestions' batches: what beats where, and who may sweep what was discarded."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest

from branchlake_dagster.cleanup.jobs import DagsterRuns
from branchlake_dagster.cleanup.reaper import Reaper
from branchlake_dagster.cleanup.reaper_rules import Limits, Reaping, ReapingAction
from branchlake_dagster.cleanup.sweeper import Sweeper, Sweeping
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import ContentKey, Namespace, Put, Reference
from branchlake_dagster.runs.branch_owner import build_batch_branch_name, load_instance_id, writer_branch
from branchlake_dagster.runs.discarding import discard_branch, discarded_tag_name
from branchlake_dagster.runs.heartbeats import Heartbeat
from branchlake_dagster.tables.table_files import TableFiles
from branchlake_dagster_tests.dagster_internals import create_run_for_test
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.instances import new_instance

lakehouse = memory.lakehouse

HOUR = timedelta(hours=1)
NOBODY = "ref.name == ''"


class Hearts:
    """Heartbeats in memory."""

    def __init__(self, *beats: Heartbeat) -> None:
        self.beats = list(beats)

    def all(self) -> Sequence[Heartbeat]:
        return tuple(self.beats)

    def remove(self, branch: str, writer: str) -> None:
        self.beats = [one for one in self.beats if (one.branch, one.writer) != (branch, writer)]


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with new_instance() as found:
        yield found


def begun(lake: Lakehouse, instance: dg.DagsterInstance, run: dg.DagsterRun) -> Reference:
    """The branch of a batch that has just begun."""
    name = build_batch_branch_name(
        run.run_id, load_instance_id(instance) or "", now=datetime.now(UTC), random_id=uuid.uuid4()
    )
    return lake.nessie.create_branch(name, from_ref=MAIN, from_hash=lake.nessie.reference(MAIN).hash)


def reaped(
    lake: Lakehouse,
    instance: dg.DagsterInstance,
    branch: str,
    hearts: Hearts,
    *,
    moment: datetime,
    dead: Collection[Heartbeat] = (),
    named: bool = False,
) -> Reaping:
    (found,) = Reaper(
        lake.nessie,
        DagsterRuns(instance),
        Limits(max_age=6 * HOUR, orphan_grace=HOUR),
        heartbeats=hearts,
        now=lambda: moment,
        monotonic=lambda: 0.0,
        sleep=lambda _: None,
        is_on_main=lambda *_: True,
        ref_filter=f"ref.name == '{branch}'",
        discarded_filter=NOBODY,
        claim_filter=NOBODY,
        instance=load_instance_id(instance),
        only=[branch] if named else None,
        anyones=named,
    ).run(dead=dead)
    return found


@pytest.mark.parametrize("named", [False, True])
def test_the_heartbeat_of_the_live_run_is_that_of_its_batch(
    lakehouse: Lakehouse, instance: dg.DagsterInstance, named: bool
) -> None:
    run = create_run_for_test(instance, run_id=str(uuid.uuid4()), status=dg.DagsterRunStatus.STARTED)
    branch = begun(lakehouse, instance, run).name
    moment = datetime.now(UTC) + 100 * HOUR
    beat = Heartbeat(writer_branch(branch), "writer", run.run_id, written_at=moment, host="h")
    hearts = Hearts(beat)
    found = reaped(lakehouse, instance, branch, hearts, moment=moment, named=named)
    assert (found.action, found.reason.code) == (ReapingAction.KEEP, "writer_alive")
    assert (found.run_id, found.heartbeat) == (run.run_id, "beating")
    later = moment + HOUR
    found = reaped(lakehouse, instance, branch, hearts, moment=later, named=named)
    assert (found.action, found.heartbeat) == (ReapingAction.KEEP, "silent, not watched yet")
    found = reaped(lakehouse, instance, branch, hearts, moment=later, dead=[beat], named=named)
    assert (found.action, found.reason.code) == (ReapingAction.DISCARD, "writer_dead")
    assert branch not in {one.name for one in lakehouse.nessie.references()}
    # It does not take the place of the run's own branch, of which nobody has written here.
    ended = instance.get_run_by_id(run.run_id)
    assert ended is not None
    assert ended.is_failure
    assert not hearts.beats


def test_a_discarded_batch_is_swept_by_its_own_instance(
    lakehouse: Lakehouse, instance: dg.DagsterInstance
) -> None:
    """Whatever wrote the commits said nothing in them."""
    run = create_run_for_test(instance, run_id=str(uuid.uuid4()), status=dg.DagsterRunStatus.STARTED)
    made = begun(lakehouse, instance, run)
    key = ContentKey([f"n{uuid.uuid4().hex[:8]}"])
    lakehouse.nessie.commit(
        made.name, expected_hash=made.hash, operations=[Put(key, Namespace(None, key.elements))], message="x"
    )
    tag = discard_branch(lakehouse.nessie, lakehouse.nessie.reference(made.name))
    assert tag is not None
    assert tag.name == discarded_tag_name(made.name)

    def swept(by: dg.DagsterInstance) -> Sweeping:
        (found,) = Sweeper(
            lakehouse.nessie,
            TableFiles(lakehouse.settings.file_io_properties()),
            DagsterRuns(by).owners,
            grace=timedelta(0),
            now=lambda: datetime.now(UTC) + HOUR,
            ref_filter=f"ref.name == '{tag.name}'",
            instance=load_instance_id(by),
        ).run()
        return found

    with new_instance() as other:
        kept = swept(other)
    assert not kept.done
    assert (kept.reason.code, load_instance_id(instance) in kept.reason) == ("made_elsewhere", True)
    assert swept(instance).done
    assert not [
        one for one in lakehouse.nessie.references() if one.name.endswith(made.name.removeprefix("run-"))
    ]
