"""Why a change cannot be told."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from branchlake_dagster.errors import BranchlakeError, Terminal


class Loss(StrEnum):
    """What became of the state that a position stands for."""

    ROLLED_BACK = "rolled back"
    """The table's history does not hold it any more."""
    RECREATED = "dropped and created again"
    EXPIRED = "its snapshots have expired"
    FILES_GONE = "files of the change have been deleted"
    RESULT_ROLLED_BACK = "the consumer's own table was rolled back"


class ChangeLost(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """What changed since a position cannot be told any more; `loss` says why."""

    def __init__(
        self,
        message: str,
        *,
        loss: Loss,
        table: str | None = None,
        partitions: Iterable[str] = (),
        branch: str | None = None,
        run_id: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, table=table, partitions=partitions, branch=branch, run_id=run_id, hint=hint)
        self.loss = loss


class RowsUnreadable(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The changed rows cannot be read one by one, as those that an equality delete file hits."""
