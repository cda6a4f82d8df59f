"""The branch of one batch of a live ingestion: its name says whose it is and how old.

No run is called like it, and Nessie tells neither of a branch that has no commit of its own yet. So the name
is `run-{UUIDv7}.{live run}.{Dagster instance}`: that of a writer which died as soon as it had made the branch
says it too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from branchlake_dagster.branching.branch import reference_names
from branchlake_dagster.branching.branch.run_branch import branch_name

_UUID = re.compile(reference_names.UUID)
_UNKNOWN = str(UUID(int=0))
_RANDOM_BITS = 76
"""Of a UUIDv7 what is behind the time and the version, the variant included."""


@dataclass(frozen=True)
class BatchBranch:
    """What the name says: the live run and the Dagster instance (empty: not known), and when it was made."""

    run_id: str
    instance: str
    began: datetime

    @classmethod
    def of(cls, reference: str) -> BatchBranch | None:
        """What the name of a branch, or of a tag in its place, says; None: it is no batch's."""
        parts = reference_names.run_of(reference).split(".")
        if len(parts) != 3 or not all(_UUID.fullmatch(part) for part in parts) or parts[0][14] != "7":
            return None
        try:
            began = datetime.fromtimestamp((UUID(parts[0]).int >> 80) / 1000, UTC)
        except (ValueError, OverflowError):
            return None  # after the year 9999
        run_id, instance = ("" if part == _UNKNOWN else part for part in parts[1:])
        return cls(run_id, instance, began)


def batch_branch(run_id: str, instance: str, *, now: datetime, unique: UUID) -> str:
    """The name for a new batch of a live run; `unique` is a random UUID, of which all but the time is taken.

    Of ids that are no UUIDs it says nothing.
    """
    millis = int(now.timestamp() * 1000)
    own = UUID(int=millis << 80 | 7 << _RANDOM_BITS | unique.int & (1 << _RANDOM_BITS) - 1)
    said = (one if _UUID.fullmatch(one) else _UNKNOWN for one in (run_id, instance))
    return branch_name(".".join((str(own), *said)))


def at_work_on(branch: str) -> str:
    """The branch that is named after the run which works on this one: the same, but for a batch's."""
    batch = BatchBranch.of(branch)
    return branch_name(batch.run_id) if batch else branch
