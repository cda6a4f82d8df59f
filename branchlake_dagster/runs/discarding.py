"""The end of a run's branch: it is renamed to a tag, and the run and its assets in Dagster say so.

Fencing a run: its branch is renamed to a tag, so that it cannot be written to and nothing is lost yet.

The tag is the journal of the clean-up and lives in Nessie. `discarded-{run_id}` means: nobody writes here any
more, a retry may still take it back. `sweeping-{run_id}` means: its files are being deleted. The tag is made
before the branch is deleted, so a crash in between loses neither; every step may be repeated.

A run that is not published has materialised nothing that `main` has, and must not look as though it had.

Dagster keeps the materialisations of its steps, whatever becomes of the run. A blocked partition counted as
filled, so a backfill of what was "failed and missing" went round it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dagster import (
    AssetKey,
    AssetRecordsFilter,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
)

from branchlake_dagster.internals.dagster import report_planned_again
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieAlreadyExists, NessieConflict, ReferenceNotFound
from branchlake_dagster.nessie.model import Reference, ReferenceType
from branchlake_dagster.runs.branch_names import tags
from branchlake_dagster.runs.claims import release_claim
from branchlake_dagster.runs.run_branch import run_id_of
from branchlake_dagster.runs.run_tags import CONTINUED, NONE, PUBLISHER, UNJUDGED, Status, place_of, shortened
from branchlake_dagster.stored_names import ReferencePrefix, RunTag
from branchlake_dagster.tables.errors import RetryNeedsFullRun

DISCARDED_TAGS = tags(ReferencePrefix.DISCARDED)
"""Nessie's filter for the states that a retry may still take."""

_ATTEMPTS = 4


def discarded_name(branch: str) -> str:
    """The tag a run branch becomes when it is discarded."""
    return f"{ReferencePrefix.DISCARDED}{run_id_of(branch)}"


def discard(client: NessieClient, branch: Reference) -> Reference | None:
    """Fence the writer of `branch` and keep its state as a tag, which is returned.

    None when the branch holds no commit of its own: then it is only deleted. Raises NessieConflict when it
    was written to after `branch` was read; it stays then. Safe to repeat after any failure.
    """
    if branch.metadata is None:
        try:
            branch = _with_metadata(client, branch)
        except ReferenceNotFound:
            return _tag_at(client, discarded_name(branch.name), branch.hash)
    if branch.metadata and branch.metadata.commits_ahead == 0:
        _delete(client, branch)
        return None
    tag = _tag(client, discarded_name(branch.name), branch)
    try:
        _delete(client, branch)
    except NessieConflict:
        # A late write: what the tag holds is no longer all of it.
        _untag(client, tag)
        raise
    # A retry that took an earlier discard back may have claimed the tag while we deleted its branch.
    return _tag_at(client, tag.name, tag.hash) or _tag(client, tag.name, branch)


def take_over(client: NessieClient, branch: str, own: str) -> Reference | None:
    """Continue the work of `branch`, discarded or not, as branch `own`; None when there is neither.

    The state moves to the new name and the old name goes, so a writer of the old one that is still alive
    stays fenced. Safe to repeat, and to do by several steps of one run at once. Raises RetryNeedsFullRun
    when the clean-up of the discarded branch has begun.
    """
    for _ in range(_ATTEMPTS):
        source = _find(client, branch) or _find(client, discarded_name(branch))
        if source is None:
            return _find(client, own)
        try:
            # From main and not from the source, which may be gone: the hash alone says what is meant.
            found, made = client.create_branch(own, from_ref=MAIN, from_hash=source.hash), True
        except NessieAlreadyExists:
            # By another step of this run, or before a crash of this one, which then left the old name.
            found, made = client.reference(own), False
        try:
            if made or found.hash == source.hash:
                _remove(client, source)
        except (NessieConflict, ReferenceNotFound):
            # Written to, discarded or claimed meanwhile: what we made is not all of it, or not ours.
            if made:
                _delete(client, found)
                continue
        return found
    raise RetryNeedsFullRun(
        "The branch of the run's parent is being written to or cleaned up.",
        branch=branch,
        hint="Re-execute all steps.",
        reason="branch_busy",
    )


def give_back(client: NessieClient, branch: str, tag: Reference) -> bool:
    """Make `branch` again from its tag, which then goes; whether it was made.

    Only for a branch that nobody else may take from the tag. Safe to repeat after any failure: a tag that
    is left over beside the branch is swept like any other.
    """
    try:
        client.create_branch(branch, from_ref=MAIN, from_hash=tag.hash)
    except NessieAlreadyExists:
        return False  # another clean-up was faster, or the one that fences it is not done
    _untag(client, tag)
    return True


def _with_metadata(client: NessieClient, branch: Reference) -> Reference:
    """The branch as it was handed in, with the metadata of that very hash; NessieConflict when it moved."""
    found = client.reference(branch.name, fetch_metadata=True)
    if found.hash != branch.hash:
        raise NessieConflict("The branch was written to meanwhile.", branch=branch.name)
    return found


def _remove(client: NessieClient, ref: Reference) -> None:
    delete = client.delete_tag if ref.type is ReferenceType.TAG else client.delete_branch
    delete(ref.name, expected_hash=ref.hash)


def _delete(client: NessieClient, branch: Reference) -> None:
    try:
        _remove(client, branch)
    except ReferenceNotFound:
        return  # another clean-up was faster; the tag stands, whoever made it


def _tag(client: NessieClient, name: str, branch: Reference) -> Reference:
    """Tag `name` at the branch's hash, in place of one that an interrupted clean-up left elsewhere."""
    for _ in range(_ATTEMPTS):
        try:
            return client.create_tag(name, from_ref=MAIN, from_hash=branch.hash)
        except NessieAlreadyExists as taken:
            last = taken
            found = _find(client, name)
            if found is not None and found.hash == branch.hash:
                return found
            if found is not None:
                _untag(client, found)
    raise last


def _untag(client: NessieClient, tag: Reference) -> None:
    try:
        _remove(client, tag)
    except (ReferenceNotFound, NessieConflict):
        return  # replaced or claimed by somebody who knows more


def _find(client: NessieClient, name: str) -> Reference | None:
    try:
        return client.reference(name)
    except ReferenceNotFound:
        return None


def _tag_at(client: NessieClient, name: str, at: str) -> Reference | None:
    found = _find(client, name)
    return found if found is not None and found.hash == at else None


FAILS = (Status.BLOCKED, Status.REFUSED)
"""What makes a run fail whose steps have all succeeded."""

FAILURE_REASON_TAG = "dagster/failure_reason"
FAILS_BY_ITSELF = {"STEP_FAILURE", "RUN_EXCEPTION", "JOB_INITIALIZATION_FAILURE", "START_TIMEOUT"}
"""What Dagster says there of runs that would fail again; of one that was interrupted it says another, of one
whose process was gone none."""

_PAGE = 1_000


def failure(reason: str, next_step: str = "") -> str:
    """The message with which an unpublished run fails; `next_step` is a sentence on what to do."""
    return f"Not published: {reason.rstrip('.')}. main is as it was. {next_step}".rstrip()


def fail_unpublished(instance: DagsterInstance, run_id: str, reason: str, next_step: str = "") -> None:
    """Let a run that succeeded and is not published fail with `reason`. Doing it twice does it once."""
    run = instance.get_run_by_id(run_id)
    if run is not None and run.is_success:
        instance.add_run_tags(run_id, {RunTag.FAILED_BY: PUBLISHER})
        instance.report_run_failed(run, failure(reason, next_step))


def status_without_verdict(run: DagsterRun) -> Status:
    """The word for a run that is not published and that the gate has not judged: how it ended.

    A run that Dagster takes for running, or that succeeded, is `discarded`: only its branch was ended.
    """
    if run.status is DagsterRunStatus.CANCELED:
        return Status.CANCELED
    if run.status is not DagsterRunStatus.FAILURE:
        return Status.DISCARDED
    by_publisher = run.tags.get(RunTag.FAILED_BY) == PUBLISHER
    by_itself = run.tags.get(FAILURE_REASON_TAG) in FAILS_BY_ITSELF
    return Status.FAILED if by_publisher or by_itself else Status.INTERRUPTED


def take_back(instance: DagsterInstance, run: DagsterRun, run_ids: Iterable[str]) -> None:
    """Let the partitions that `run_ids` have materialised count as failed, once `run` has failed.

    `run_ids` are the run itself and those whose work it continued. A partition that another run has
    materialised since is left as that run left it. Doing it twice shows the same as doing it once.
    """
    for run_id in run_ids:
        for key, partition, step in materialised(instance, run_id):
            if newest_run(instance, key, partition) == run_id:
                report_planned_again(instance, run, key, partition, step)


def materialised(instance: DagsterInstance, run_id: str) -> Iterator[tuple[AssetKey, str | None, str | None]]:
    """What a run has materialised, once each, with the step that did."""
    found: dict[tuple[AssetKey, str | None], str | None] = {}
    cursor: str | None = None
    while True:
        page = instance.get_records_for_run(
            run_id, cursor=cursor, of_type=DagsterEventType.ASSET_MATERIALIZATION, limit=_PAGE
        )
        for record in page.records:
            made = record.asset_materialization
            if made is not None:
                found[made.asset_key, made.partition] = record.event_log_entry.step_key
        if not page.has_more:
            break
        cursor = page.cursor
    return ((key, partition, step) for (key, partition), step in found.items())


def newest_run(instance: DagsterInstance, key: AssetKey, partition: str | None) -> str | None:
    """The run that materialised a partition last."""
    wanted = AssetRecordsFilter(asset_key=key, asset_partitions=[partition] if partition else None)
    records = instance.fetch_materializations(wanted, limit=1).records
    return records[0].run_id if records else None


def finish_branch(client: NessieClient, branch: Reference, *, keep_data: bool) -> None:
    """Delete the branch, then its claim. A branch that stays keeps it: somebody has begun with it."""
    if drop_branch(client, branch, keep_data=keep_data):
        release_claim(client, branch.name, at=branch.hash)


def drop_branch(client: NessieClient, branch: Reference, *, keep_data: bool) -> bool:
    """Delete the branch at the hash that was judged; whether it is gone.

    `keep_data`: its files are `main`'s now. Otherwise it becomes a tag, until its files are deleted.
    """
    try:
        if keep_data:
            client.delete_branch(branch.name, expected_hash=branch.hash)
        else:
            discard(client, branch)
    except ReferenceNotFound:
        return True  # another publisher was faster
    except NessieConflict:
        # A late writer. The run is over: the next pass finds the verdict told and deletes what is there.
        return False
    return True


def report_end(
    instance: DagsterInstance,
    run_id: str,
    branch: str,
    *,
    verdict: str,
    reason: str,
    status: Status | None = None,
) -> bool:
    """Show `verdict` and `reason` on a run that opened `branch` and has no verdict; whether it was shown.

    `status` is the word in the run list, by default how the run ended. It is no publisher's word: should the
    run pass after all, it is judged as though nothing had been said.
    """
    run = instance.get_run_by_id(run_id)
    place = place_of(run.tags, run_id) if run else None
    if run is None or place is None or place.branch != branch:
        return False
    told = run.tags.get(RunTag.VERDICT)
    if told not in UNJUDGED or told == verdict:
        return False
    instance.report_engine_event(f"Not published: {reason.rstrip('.')}.", run)
    aside = {RunTag.NEXT_ATTEMPT: NONE} if RunTag.NEXT_ATTEMPT in run.tags else {}
    status = Status.CONTINUED if verdict == CONTINUED else status or status_without_verdict(run)
    shown = {RunTag.STATUS: str(status), RunTag.VERDICT: verdict, RunTag.REASON: shortened(reason)}
    instance.add_run_tags(run_id, {**shown, **aside})
    if status is not Status.CONTINUED:
        take_back(instance, run, [run_id])
    return True
