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
from branchlake_dagster.runs.branch_names import tag_filter
from branchlake_dagster.runs.claims import release_claim
from branchlake_dagster.runs.run_branch import run_id_of_branch
from branchlake_dagster.runs.run_tags import (
    CONTINUED,
    NO_VALUE,
    PUBLISHER,
    UNJUDGED,
    Status,
    find_run_location,
    shorten_tag_value,
)
from branchlake_dagster.stored_names import ReferencePrefix, RunTag
from branchlake_dagster.tables.errors import RetryNeedsFullRun

DISCARDED_TAG_FILTER = tag_filter(ReferencePrefix.DISCARDED)
"""Nessie's filter for the states that a retry may still take."""

_MAX_ATTEMPTS = 4


def discarded_tag_name(branch: str) -> str:
    """The tag a run branch becomes when it is discarded."""
    return f"{ReferencePrefix.DISCARDED}{run_id_of_branch(branch)}"


def discard_branch(client: NessieClient, branch: Reference) -> Reference | None:
    """Fence the writer of `branch` and keep its state as a tag, which is returned.

    None when the branch holds no commit of its own: then it is only deleted. Raises NessieConflict when it
    was written to after `branch` was read; it stays then. Safe to repeat after any failure.
    """
    if branch.metadata is None:
        try:
            branch = _load_with_metadata(client, branch)
        except ReferenceNotFound:
            return _find_tag_at(client, discarded_tag_name(branch.name), branch.hash)
    if branch.metadata and branch.metadata.commits_ahead == 0:
        _delete_branch(client, branch)
        return None
    tag = _create_tag(client, discarded_tag_name(branch.name), branch)
    try:
        _delete_branch(client, branch)
    except NessieConflict:
        # A late write: what the tag holds is no longer all of it.
        _delete_tag(client, tag)
        raise
    # A retry that took an earlier discard back may have claimed the tag while we deleted its branch.
    return _find_tag_at(client, tag.name, tag.hash) or _create_tag(client, tag.name, branch)


def take_over_branch(client: NessieClient, branch: str, own_name: str) -> Reference | None:
    """Continue the work of `branch`, discarded or not, as branch `own_name`; None when there is neither.

    The state moves to the new name and the old name goes, so a writer of the old one that is still alive
    stays fenced. Safe to repeat, and to do by several steps of one run at once. Raises RetryNeedsFullRun
    when the clean-up of the discarded branch has begun.
    """
    for _ in range(_MAX_ATTEMPTS):
        source = _find_reference(client, branch) or _find_reference(client, discarded_tag_name(branch))
        if source is None:
            return _find_reference(client, own_name)
        try:
            # From main and not from the source, which may be gone: the hash alone says what is meant.
            own_branch, is_new = client.create_branch(own_name, from_ref=MAIN, from_hash=source.hash), True
        except NessieAlreadyExists:
            # By another step of this run, or before a crash of this one, which then left the old name.
            own_branch, is_new = client.reference(own_name), False
        try:
            if is_new or own_branch.hash == source.hash:
                _delete_reference(client, source)
        except (NessieConflict, ReferenceNotFound):
            # Written to, discarded or claimed meanwhile: what we made is not all of it, or not ours.
            if is_new:
                _delete_branch(client, own_branch)
                continue
        return own_branch
    raise RetryNeedsFullRun(
        "The branch of the run's parent is being written to or cleaned up.",
        branch=branch,
        hint="Re-execute all steps.",
        reason="branch_busy",
    )


def restore_branch(client: NessieClient, branch: str, tag: Reference) -> bool:
    """Make `branch` again from its tag, which then goes; whether it was made.

    Only for a branch that nobody else may take from the tag. Safe to repeat after any failure: a tag that
    is left over beside the branch is swept like any other.
    """
    try:
        client.create_branch(branch, from_ref=MAIN, from_hash=tag.hash)
    except NessieAlreadyExists:
        return False  # another clean-up was faster, or the one that fences it is not done
    _delete_tag(client, tag)
    return True


def _load_with_metadata(client: NessieClient, branch: Reference) -> Reference:
    """The branch as it was handed in, with the metadata of that very hash; NessieConflict when it moved."""
    current = client.reference(branch.name, fetch_metadata=True)
    if current.hash != branch.hash:
        raise NessieConflict("The branch was written to meanwhile.", branch=branch.name)
    return current


def _delete_reference(client: NessieClient, ref: Reference) -> None:
    delete = client.delete_tag if ref.type is ReferenceType.TAG else client.delete_branch
    delete(ref.name, expected_hash=ref.hash)


def _delete_branch(client: NessieClient, branch: Reference) -> None:
    try:
        _delete_reference(client, branch)
    except ReferenceNotFound:
        return  # another clean-up was faster; the tag stands, whoever made it


def _create_tag(client: NessieClient, name: str, branch: Reference) -> Reference:
    """Tag `name` at the branch's hash, in place of one that an interrupted clean-up left elsewhere."""
    for _ in range(_MAX_ATTEMPTS):
        try:
            return client.create_tag(name, from_ref=MAIN, from_hash=branch.hash)
        except NessieAlreadyExists as error:
            last_error = error
            existing_tag = _find_reference(client, name)
            if existing_tag is not None and existing_tag.hash == branch.hash:
                return existing_tag
            if existing_tag is not None:
                _delete_tag(client, existing_tag)
    raise last_error


def _delete_tag(client: NessieClient, tag: Reference) -> None:
    try:
        _delete_reference(client, tag)
    except (ReferenceNotFound, NessieConflict):
        return  # replaced or claimed by somebody who knows more


def _find_reference(client: NessieClient, name: str) -> Reference | None:
    try:
        return client.reference(name)
    except ReferenceNotFound:
        return None


def _find_tag_at(client: NessieClient, name: str, hash_: str) -> Reference | None:
    tag = _find_reference(client, name)
    return tag if tag is not None and tag.hash == hash_ else None


FAILING_STATUSES = (Status.BLOCKED, Status.REFUSED)
"""What makes a run fail whose steps have all succeeded."""

FAILURE_REASON_TAG = "dagster/failure_reason"
PERMANENT_FAILURES = {"STEP_FAILURE", "RUN_EXCEPTION", "JOB_INITIALIZATION_FAILURE", "START_TIMEOUT"}
"""What Dagster says there of runs that would fail again; of one that was interrupted it says another, of one
whose process was gone none."""

_PAGE_SIZE = 1_000


def format_failure(reason: str, next_step: str = "") -> str:
    """The message with which an unpublished run fails; `next_step` is a sentence on what to do."""
    return f"Not published: {reason.rstrip('.')}. main is as it was. {next_step}".rstrip()


def fail_unpublished_run(instance: DagsterInstance, run_id: str, reason: str, next_step: str = "") -> None:
    """Let a run that succeeded and is not published fail with `reason`. Doing it twice does it once."""
    run = instance.get_run_by_id(run_id)
    if run is not None and run.is_success:
        instance.add_run_tags(run_id, {RunTag.FAILED_BY: PUBLISHER})
        instance.report_run_failed(run, format_failure(reason, next_step))


def status_without_verdict(run: DagsterRun) -> Status:
    """The word for a run that is not published and that the gate has not judged: how it ended.

    A run that Dagster takes for running, or that succeeded, is `discarded`: only its branch was ended.
    """
    if run.status is DagsterRunStatus.CANCELED:
        return Status.CANCELED
    if run.status is not DagsterRunStatus.FAILURE:
        return Status.DISCARDED
    by_publisher = run.tags.get(RunTag.FAILED_BY) == PUBLISHER
    by_itself = run.tags.get(FAILURE_REASON_TAG) in PERMANENT_FAILURES
    return Status.FAILED if by_publisher or by_itself else Status.INTERRUPTED


def revoke_materializations(instance: DagsterInstance, run: DagsterRun, run_ids: Iterable[str]) -> None:
    """Let the partitions that `run_ids` have materialised count as failed, once `run` has failed.

    `run_ids` are the run itself and those whose work it continued. A partition that another run has
    materialised since is left as that run left it. Doing it twice shows the same as doing it once.
    """
    for run_id in run_ids:
        for key, partition, step in iter_materializations(instance, run_id):
            if load_newest_run_id(instance, key, partition) == run_id:
                report_planned_again(instance, run, key, partition, step)


def iter_materializations(
    instance: DagsterInstance, run_id: str
) -> Iterator[tuple[AssetKey, str | None, str | None]]:
    """What a run has materialised, once each, with the step that did."""
    step_keys: dict[tuple[AssetKey, str | None], str | None] = {}
    cursor: str | None = None
    while True:
        page = instance.get_records_for_run(
            run_id, cursor=cursor, of_type=DagsterEventType.ASSET_MATERIALIZATION, limit=_PAGE_SIZE
        )
        for record in page.records:
            materialization = record.asset_materialization
            if materialization is not None:
                step_keys[materialization.asset_key, materialization.partition] = (
                    record.event_log_entry.step_key
                )
        if not page.has_more:
            break
        cursor = page.cursor
    return ((key, partition, step) for (key, partition), step in step_keys.items())


def load_newest_run_id(instance: DagsterInstance, key: AssetKey, partition: str | None) -> str | None:
    """The run that materialised a partition last."""
    records_filter = AssetRecordsFilter(asset_key=key, asset_partitions=[partition] if partition else None)
    records = instance.fetch_materializations(records_filter, limit=1).records
    return records[0].run_id if records else None


def end_branch_and_claim(client: NessieClient, branch: Reference, *, keep_data: bool) -> None:
    """Delete the branch, then its claim. A branch that stays keeps it: somebody has begun with it."""
    if end_judged_branch(client, branch, keep_data=keep_data):
        release_claim(client, branch.name, expected_hash=branch.hash)


def end_judged_branch(client: NessieClient, branch: Reference, *, keep_data: bool) -> bool:
    """Delete the branch at the hash that was judged; whether it is gone.

    `keep_data`: its files are `main`'s now. Otherwise it becomes a tag, until its files are deleted.
    """
    try:
        if keep_data:
            client.delete_branch(branch.name, expected_hash=branch.hash)
        else:
            discard_branch(client, branch)
    except ReferenceNotFound:
        return True  # another publisher was faster
    except NessieConflict:
        # A late writer. The run is over: the next pass finds the verdict told and deletes what is there.
        return False
    return True


def report_branch_end(
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
    location = find_run_location(run.tags, run_id) if run else None
    if run is None or location is None or location.branch != branch:
        return False
    recorded_verdict = run.tags.get(RunTag.VERDICT)
    if recorded_verdict not in UNJUDGED or recorded_verdict == verdict:
        return False
    instance.report_engine_event(f"Not published: {reason.rstrip('.')}.", run)
    reset_tags = {RunTag.NEXT_ATTEMPT: NO_VALUE} if RunTag.NEXT_ATTEMPT in run.tags else {}
    status = Status.CONTINUED if verdict == CONTINUED else status or status_without_verdict(run)
    outcome_tags = {
        RunTag.STATUS: str(status),
        RunTag.VERDICT: verdict,
        RunTag.REASON: shorten_tag_value(reason),
    }
    instance.add_run_tags(run_id, {**outcome_tags, **reset_tags})
    if status is not Status.CONTINUED:
        revoke_materializations(instance, run, [run_id])
    return True
