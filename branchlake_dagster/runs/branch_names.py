"""Name the Nessie references that branchlake creates, and recognize them.

A name consists of a prefix and the run's UUID, so that references of users are never taken for branchlake's.
`publish-q3-report` was once deleted as a publication branch, and `run-experiment` would have been reaped. The
branch of a live ingestion's batch has three UUIDs after the prefix (`build_batch_branch_name`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from branchlake_dagster.stored_names import ReferencePrefix, RunTag
from branchlake_dagster.tables.errors import InvalidCheckRun

UUID_PATTERN = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
"""A regular expression for Python and for Nessie's filters."""
_ALL_PREFIXES = (
    ReferencePrefix.RUN,
    ReferencePrefix.PUBLICATION,
    ReferencePrefix.DISCARDED,
    ReferencePrefix.SWEEPING,
    ReferencePrefix.CLAIM,
)


def _name_pattern(*prefixes: str) -> str:
    return f"^({'|'.join(prefixes)}){UUID_PATTERN}([.]{UUID_PATTERN}[.]{UUID_PATTERN})?$"


def branch_filter(*prefixes: str) -> str:
    """Return Nessie's filter for branchlake's branches with these prefixes."""
    return f"refType == 'BRANCH' && ref.name.matches('{_name_pattern(*prefixes)}')"


def tag_filter(*prefixes: str) -> str:
    """Return Nessie's filter for branchlake's tags with these prefixes."""
    return f"refType == 'TAG' && ref.name.matches('{_name_pattern(*prefixes)}')"


def is_own_reference(name: str, *prefixes: str) -> bool:
    """Return whether branchlake uses this reference name. Without `prefixes`, any of its prefixes counts."""
    return re.fullmatch(_name_pattern(*(prefixes or _ALL_PREFIXES)), name) is not None


def strip_name_prefix(name: str) -> str:
    """Return the id after the prefix of a reference name: the id of a run, or the three ids of a batch."""
    for prefix in _ALL_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


_HASH_PATTERN = re.compile(r"[0-9a-f]{16,64}")


def find_check_reference(run_id: str, tags: Mapping[str, str]) -> str | None:
    """Return the reference `name@hash` that a check run reads; None for every other run.

    Whoever launches the run sets its tags. So only a publication branch at a fixed hash is accepted, because
    a catalog or Spark session at a fixed hash is read-only. A tag that named `main` once let a run write
    there without any check.

    Raises:
        InvalidCheckRun: The tags name another reference, or no hash.
    """
    if RunTag.CHECK_REF not in tags:
        return None
    branch_name, hash_ = tags[RunTag.CHECK_REF], tags.get(RunTag.CHECK_HASH, "")
    if not is_own_reference(branch_name, ReferencePrefix.PUBLICATION) or not _HASH_PATTERN.fullmatch(hash_):
        raise InvalidCheckRun(
            f"The run's tags make it a check run, but {branch_name}@{hash_} is not a prepared publication"
            " state.",
            branch=branch_name,
            run_id=run_id,
            hint=f"Remove the tags {RunTag.CHECK_REF} and {RunTag.CHECK_HASH}, and launch the run again.",
        )
    return f"{branch_name}@{hash_}"
