"""Ends a run's branch: claims the branch, fences its writer, keeps its state, and reports the end in Dagster.

A publisher claims a branch by a tag at the hash that it has read. This hash is final for all publishers,
because creating a reference is an atomic compare-and-set in Nessie. Without a claim, two publishers judged
two states of one branch, one before and one after the late write of a dead run. The second state was merged
on top of the first.

Other tags in Nessie are the journal of the cleanup. `discarded-{run_id}` means that nobody can write to the
branch, but a retry may continue it. `sweeping-{run_id}` means that its files are being deleted. The tag is
created before the branch is deleted, so a crash loses neither. Every step may be repeated.

Dagster keeps the materializations of a run even if the run is not published. A blocked partition once counted
as filled, and a backfill of "failed and missing" partitions skipped it. So these materializations are
revoked.
"""

from __future__ import annotations

import contextlib
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
from branchlake_dagster.runs.branch_owner import tag_filter
from branchlake_dagster.runs.run_branch import run_branch_name, run_id_of_branch
from branchlake_dagster.runs.run_tags import (
    CONTINUED,
    NO_VALUE,
    PUBLISHER,
    UNJUDGED,
    RunState,
    build_status_tag,
    find_run_location,
    is_opened_by,
    shorten_tag_value,
)
from branchlake_dagster.stored_names import ReferencePrefix, RunTag
from branchlake_dagster.tables.errors import RetryNeedsFullRun

CLAIM_TAG_FILTER = tag_filter(ReferencePrefix.CLAIM)
"""Nessie's filter for the tags of claims."""


def claim_tag_name(branch: str) -> str:
    """Return the name of the tag that claims a run branch."""
    return f"{ReferencePrefix.CLAIM}{run_id_of_branch(branch)}"


def claim_branch(client: NessieClient, branch: Reference) -> tuple[str, bool]:
    """Claim the branch at the hash of `branch`, unless a publisher has claimed it already.

    Returns the hash at which it is claimed, which is the only hash that may be published. Also returns
    whether a publisher had claimed it before.
    """
    try:
        return client.create_tag(
            claim_tag_name(branch.name), from_ref=MAIN, from_hash=branch.hash
        ).hash, False
    except NessieAlreadyExists:
        return client.reference(claim_tag_name(branch.name)).hash, True


def is_claimed(client: NessieClient, branch: str) -> bool:
    """Return whether a publisher has claimed the branch."""
    try:
        client.reference(claim_tag_name(branch))
    except ReferenceNotFound:
        return False
    return True


def release_claim(client: NessieClient, branch: str, *, expected_hash: str | None = None) -> None:
    """Delete the claim of a branch that no longer exists. A missing claim is not an error.

    `expected_hash` is the probable hash of the claim, which saves a request. If another process changes the
    claim meanwhile, it stays; the reaper deletes it later.
    """
    name = claim_tag_name(branch)
    try:
        if expected_hash is not None:
            with contextlib.suppress(NessieConflict):
                client.delete_tag(name, expected_hash=expected_hash)
                return
        client.delete_tag(name, expected_hash=client.reference(name).hash)
    except (ReferenceNotFound, NessieConflict):
        return  # another publisher was faster


def list_claimed_branches(client: NessieClient, claim_filter: str = CLAIM_TAG_FILTER) -> list[str]:
    """Return the names of the branches that a publisher has claimed, including deleted branches.

    `claim_filter` is Nessie's filter for the tags that are read.
    """
    claim_tags = client.references(filter=claim_filter)
    return [run_branch_name(tag.name.removeprefix(ReferencePrefix.CLAIM)) for tag in claim_tags]


def release_leftover_claim(client: NessieClient, branch: str) -> None:
    """Delete the claim of a branch if the branch is gone."""
    try:
        client.reference(branch)
    except ReferenceNotFound:
        release_claim(client, branch)


DISCARDED_TAG_FILTER = tag_filter(ReferencePrefix.DISCARDED)
"""Nessie's filter for the tags of discarded branches, which a retry may still continue."""

_MAX_ATTEMPTS = 4


def discarded_tag_name(branch: str) -> str:
    """Return the name of the tag that replaces a discarded run branch."""
    return f"{ReferencePrefix.DISCARDED}{run_id_of_branch(branch)}"


def sweeping_tag_name(branch: str) -> str:
    """Return the name of the tag by which a sweep claims a discarded run branch."""
    return f"{ReferencePrefix.SWEEPING}{run_id_of_branch(branch)}"


def discard_branch(client: NessieClient, branch: Reference) -> Reference | None:
    """Fence the writer of `branch` by deleting it, and return the tag `discarded-…` that keeps its state.

    Returns None if the branch has no commit of its own, because then it is only deleted. Also returns None if
    another cleanup deleted it, and its tag is gone or claimed by a sweep. Raises NessieConflict if the branch
    was written to after `branch` was read; the branch then remains. Safe to repeat after any failure.
    """
    name = discarded_tag_name(branch.name)
    try:
        if branch.metadata is None:
            branch = _load_with_metadata(client, branch)
        if branch.metadata and branch.metadata.commits_ahead == 0:
            _delete_reference(client, branch)
            return None
        tag = _create_tag(client, name, branch, from_ref=branch.name)
        try:
            _delete_reference(client, branch)
        except NessieConflict:
            # The branch was written to late, so the tag no longer holds its whole state.
            _delete_tag(client, tag)
            raise
    except ReferenceNotFound:
        # Another cleanup has kept the state. A new tag could name a state that was swept since.
        return _find_tag_at(client, name, branch.hash)
    if found_tag := _find_tag_at(client, name, branch.hash):
        return found_tag
    if _find_tag_at(client, sweeping_tag_name(branch.name), branch.hash):
        return None
    # An earlier discard was continued while the branch was deleted, and the branch may have been restored.
    return _create_tag(client, name, branch, from_ref=MAIN)


def take_over_branch(client: NessieClient, branch: str, own_name: str) -> Reference | None:
    """Continue the work of `branch`, discarded or not, as branch `own_name`, and return the new branch.

    The state moves to the new name and the old name is deleted, so that a living writer of the old branch
    stays fenced. Safe to repeat, and several steps of one run may call it at once. Returns None if `branch`,
    its tag and `own_name` do not exist. Raises RetryNeedsFullRun if the branch is being written to or cleaned
    up.
    """
    for _ in range(_MAX_ATTEMPTS):
        source = _find_reference(client, branch) or _find_reference(client, discarded_tag_name(branch))
        if source is None:
            return _find_reference(client, own_name)
        try:
            # The source may be gone, so the reference is main. Only the hash decides the state.
            own_branch, is_new = client.create_branch(own_name, from_ref=MAIN, from_hash=source.hash), True
        except NessieAlreadyExists:
            # Another step of this run created it, or this step did before a crash that left the old name.
            own_branch, is_new = client.reference(own_name), False
        try:
            if is_new or own_branch.hash == source.hash:
                _delete_reference(client, source)
        except (NessieConflict, ReferenceNotFound) as error:
            if is_new and (isinstance(error, NessieConflict) or _has_tag(client, branch)):
                # The source was written to, discarded or claimed meanwhile: the new branch is not complete.
                with contextlib.suppress(NessieConflict):  # another step of this run has written to it
                    _delete_branch(client, own_branch)
                continue
            # Without a tag, another step of this run has deleted the source after it found the new branch.
        return own_branch
    raise RetryNeedsFullRun(
        "The branch of the run's parent is being written to or cleaned up.",
        branch=branch,
        hint="Re-execute all steps of the run.",
        reason="branch_busy",
    )


def _has_tag(client: NessieClient, branch: str) -> bool:
    """Check whether the branch was discarded, or its data is being swept."""
    return any(
        _find_reference(client, name) for name in (discarded_tag_name(branch), sweeping_tag_name(branch))
    )


def restore_branch(client: NessieClient, branch: str, tag: Reference) -> bool:
    """Create `branch` again from its tag, and delete the tag. Return whether the branch was created.

    Call it only if nobody else may take the branch from the tag. Safe to repeat after any failure: a leftover
    tag of an existing branch is swept like any other.
    """
    try:
        client.create_branch(branch, from_ref=MAIN, from_hash=tag.hash)
    except NessieAlreadyExists:
        return False  # another cleanup was faster, or the fencing is not complete
    _delete_tag(client, tag)
    return True


def _load_with_metadata(client: NessieClient, branch: Reference) -> Reference:
    """Load the metadata of the branch at this hash. Raise NessieConflict if the branch has moved."""
    current = client.reference(branch.name, fetch_metadata=True)
    if current.hash != branch.hash:
        raise NessieConflict("The branch was written to while it was being discarded.", branch=branch.name)
    return current


def _delete_reference(client: NessieClient, ref: Reference) -> None:
    delete = client.delete_tag if ref.type is ReferenceType.TAG else client.delete_branch
    delete(ref.name, expected_hash=ref.hash)


def _delete_branch(client: NessieClient, branch: Reference) -> None:
    try:
        _delete_reference(client, branch)
    except ReferenceNotFound:
        return  # another process was faster


def _create_tag(client: NessieClient, name: str, branch: Reference, *, from_ref: str) -> Reference:
    """Create tag `name` at the hash of `branch`, or return the existing tag at this hash.

    A tag that an interrupted cleanup left at another hash is replaced. Raises ReferenceNotFound if `from_ref`
    does not exist.
    """
    for _ in range(_MAX_ATTEMPTS):
        try:
            return client.create_tag(name, from_ref=from_ref, from_hash=branch.hash)
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
        return  # another process has replaced or claimed the tag


def _find_reference(client: NessieClient, name: str) -> Reference | None:
    try:
        return client.reference(name)
    except ReferenceNotFound:
        return None


def _find_tag_at(client: NessieClient, name: str, hash_: str) -> Reference | None:
    tag = _find_reference(client, name)
    return tag if tag is not None and tag.hash == hash_ else None


FAILING_STATUSES = (RunState.BLOCKED, RunState.REFUSED)
"""The statuses that make a run fail although all its steps have succeeded."""

FAILURE_REASON_TAG = "dagster/failure_reason"
PERMANENT_FAILURES = {"STEP_FAILURE", "RUN_EXCEPTION", "JOB_INITIALIZATION_FAILURE", "START_TIMEOUT"}
"""The values of the failure reason tag by which Dagster marks runs that would fail again.

An interrupted run has another value, and a run whose process died has no such tag.
"""

_PAGE_SIZE = 1_000


def format_failure(reason: str, next_step: str = "") -> str:
    """Format the message of a run that was not published: the reason, and that `main` did not change.

    `reason` is part of a sentence. `next_step` is a sentence that recommends an action; empty if there is
    none.
    """
    return f"Not published: {reason.rstrip('.')}. main is as it was. {next_step}".rstrip()


def fail_unpublished_run(instance: DagsterInstance, run_id: str, reason: str, next_step: str = "") -> None:
    """Mark a succeeded but unpublished run as failed in Dagster, with `reason`. Idempotent.

    Runs that did not succeed, or that Dagster does not have, are not changed. `next_step` is a sentence that
    recommends an action; empty if there is none.
    """
    run = instance.get_run_by_id(run_id)
    if run is not None and run.is_success:
        instance.add_run_tags(run_id, {RunTag.FAILED_BY: PUBLISHER})
        instance.report_run_failed(run, format_failure(reason, next_step))


def status_without_verdict(run: DagsterRun) -> RunState:
    """Return the status of an unpublished run without a verdict, by how the run ended.

    A failed run is FAILED if it would fail again or if a publisher failed it, else INTERRUPTED. A run that
    Dagster considers running or successful is DISCARDED, because only its branch was ended.
    """
    if run.status is DagsterRunStatus.CANCELED:
        return RunState.CANCELED
    if run.status is not DagsterRunStatus.FAILURE:
        return RunState.DISCARDED
    by_publisher = run.tags.get(RunTag.FAILED_BY) == PUBLISHER
    by_itself = run.tags.get(FAILURE_REASON_TAG) in PERMANENT_FAILURES
    return RunState.FAILED if by_publisher or by_itself else RunState.INTERRUPTED


def revoke_materializations(instance: DagsterInstance, run: DagsterRun, run_ids: Iterable[str]) -> None:
    """Mark the partitions that `run_ids` materialized as failed, after `run` has failed. Idempotent.

    `run_ids` are the run itself and the runs whose work it continued. Partitions that another run has planned
    or materialized since are not changed.
    """
    _plan_materializations_again(instance, run, run_ids)


def restore_materializations(instance: DagsterInstance, run: DagsterRun, run_ids: Iterable[str]) -> None:
    """Mark the partitions that `run_ids` materialized as filled, after `run` has published their work.

    Dagster counts a partition as failed if the run of its newest planned materialization has failed, as the
    runs before a retry have. So the event is logged once more for `run`. Its own partitions, and those that
    another run has planned or materialized since, are not changed.
    """
    restored_keys = _plan_materializations_again(
        instance, run, (run_id for run_id in run_ids if run_id != run.run_id)
    )
    if restored_keys:
        # Dagster's cache keeps a partition as failed until a new materialization.
        instance.wipe_asset_cached_status(sorted(restored_keys))


def _plan_materializations_again(
    instance: DagsterInstance, run: DagsterRun, run_ids: Iterable[str]
) -> set[AssetKey]:
    """Log that `run` plans to materialize what `run_ids` materialized. Return the keys of the assets.

    Leaves out partitions that a run outside of the chain of retries has planned or materialized since.
    """
    keys = set()
    for run_id in run_ids:
        for key, partition, step in iter_materializations(instance, run_id):
            if load_newest_run_id(instance, key, partition) == run_id and not _is_planned_by_another(
                instance, run, run_id, key, partition
            ):
                report_planned_again(instance, run, key, partition, step)
                keys.add(key)
    return keys


def _is_planned_by_another(
    instance: DagsterInstance, run: DagsterRun, run_id: str, key: AssetKey, partition: str | None
) -> bool:
    """Return whether the newest plan to materialize a partition is of a run that continues other work.

    `run_id` is the run that materialized the partition, whose work `run` continued.
    """
    planned = instance.get_latest_planned_materialization_info(key, partition)
    if planned is None or planned.run_id in (run_id, run.run_id):
        return False
    planning_run = instance.get_run_by_id(planned.run_id)
    root_run_id = run.root_run_id or run.run_id
    return planning_run is not None and (planning_run.root_run_id or planning_run.run_id) != root_run_id


def iter_materializations(
    instance: DagsterInstance, run_id: str
) -> Iterator[tuple[AssetKey, str | None, str | None]]:
    """Iterate over the assets and partitions that a run materialized, once each.

    Each element is (asset key, partition key, step key). The partition key is None without partitions, the
    step key for events outside of steps.
    """
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
    """Load the id of the run that materialized a partition last; None if it was never materialized.

    With None as partition, the newest materialization of the asset counts.
    """
    records_filter = AssetRecordsFilter(asset_key=key, asset_partitions=[partition] if partition else None)
    records = instance.fetch_materializations(records_filter, limit=1).records
    return records[0].run_id if records else None


def end_branch_and_claim(client: NessieClient, branch: Reference, *, keep_data: bool) -> None:
    """Delete the branch by `end_judged_branch`, then its claim.

    If a late write keeps the branch from being deleted, the claim stays too.
    """
    if end_judged_branch(client, branch, keep_data=keep_data):
        release_claim(client, branch.name, expected_hash=branch.hash)


def end_judged_branch(client: NessieClient, branch: Reference, *, keep_data: bool) -> bool:
    """Delete the branch at the hash that was judged. Return whether it no longer exists.

    False means that a late write has moved the branch. `keep_data` means that its files belong to `main` now.
    Otherwise a tag replaces the branch until its files are deleted.
    """
    try:
        if keep_data:
            client.delete_branch(branch.name, expected_hash=branch.hash)
        else:
            discard_branch(client, branch)
    except ReferenceNotFound:
        return True  # another publisher was faster
    except NessieConflict:
        # A late write moved the branch. The next pass finds the recorded verdict and deletes the branch.
        return False
    return True


def clear_inherited_status(instance: DagsterInstance, run_id: str) -> None:
    """Clear the status of the run that this run repeats, which Dagster has copied with the other tags.

    Opening a branch sets the run's own status. Without a branch, a failed re-execution of a published run
    would be shown as published.
    """
    run = instance.get_run_by_id(run_id)
    if run is None or is_opened_by(run.tags, run_id):
        return
    if run.tags.get(RunTag.STATUS, NO_VALUE) != NO_VALUE:
        instance.add_run_tags(run_id, {RunTag.STATUS: NO_VALUE})


def report_branch_end(
    instance: DagsterInstance,
    run_id: str,
    branch: str,
    *,
    verdict: str,
    reason: str,
    status: RunState | None = None,
) -> bool:
    """Record `verdict` and `reason` in the tags and log of the run that opened `branch`.

    Returns whether they were recorded: only if the run has no publisher's verdict and not this verdict
    already. The run's materializations are revoked, unless a retry continues its work. `status` is the status
    in the run list (default: by how the run ended). `verdict` is FENCED or CONTINUED, which is not a
    publisher's verdict: if the run passes later, it is judged as usual.
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
    status = RunState.CONTINUED if verdict == CONTINUED else status or status_without_verdict(run)
    outcome_tags = {
        **build_status_tag(status),
        RunTag.VERDICT: verdict,
        RunTag.REASON: shorten_tag_value(reason),
    }
    instance.add_run_tags(run_id, {**outcome_tags, **reset_tags})
    if status is not RunState.CONTINUED:
        revoke_materializations(instance, run, [run_id])
    return True
