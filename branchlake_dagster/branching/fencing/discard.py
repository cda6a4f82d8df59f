"""Fencing a run: its branch is renamed to a tag, so that it cannot be written to and nothing is lost yet.

The tag is the journal of the clean-up and lives in Nessie. `discarded-{run_id}` means: nobody writes here any
more, a retry may still take it back. `sweeping-{run_id}` means: its files are being deleted. The tag is made
before the branch is deleted, so a crash in between loses neither; every step may be repeated.
"""

from __future__ import annotations

from branchlake_dagster.branching.branch.reference_names import DISCARDED_PREFIX, tags
from branchlake_dagster.branching.branch.run_branch import run_id_of
from branchlake_dagster.branching.errors import RetryNeedsFullRun
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieAlreadyExists, NessieConflict, ReferenceNotFound
from branchlake_dagster.nessie.model import Reference, ReferenceType

DISCARDED_TAGS = tags(DISCARDED_PREFIX)
"""Nessie's filter for the states that a retry may still take."""

_ATTEMPTS = 4


def discarded_name(branch: str) -> str:
    """The tag a run branch becomes when it is discarded."""
    return f"{DISCARDED_PREFIX}{run_id_of(branch)}"


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
