"""Plans and results of an expiry: data classes, and their conversion to JSON and to printed rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from branchlake_dagster.expiry.retention import ExpiryPolicy, GivenUpPosition, KeptBy
from branchlake_dagster.history.change import from_epoch_ms
from branchlake_dagster.wording import format_count


@dataclass(frozen=True)
class PlannedTable:
    """The planned expiry of one table.

    `oldest_id` is the oldest kept snapshot among the ancestors of the current snapshot, written at
    `oldest_at`. `kept_by` is the rule that keeps it, and `holder` the reference or consumer's table that
    needs it, or empty. `metadata_bytes` is the size of the present metadata file without compression, in
    characters. `given_up` are positions of consumers whose snapshots expire. If the table's metadata cannot
    be read, `error` is set and the numbers are 0.
    """

    table: str
    metadata_location: str
    snapshot_count: int = 0
    expired_count: int = 0
    metadata_bytes: int = 0
    oldest_id: int | None = None
    oldest_at: datetime | None = None
    kept_by: KeptBy = KeptBy.CURRENT
    holder: str = ""
    given_up: tuple[GivenUpPosition, ...] = ()
    error: Exception | None = None


@dataclass(frozen=True)
class ExpiryPlan:
    """A planned expiry of tables on `main` at `main_hash`. Tables without snapshots are omitted.

    `unreadable_tables` are tables whose metadata file is missing or damaged, on `main` or at the horizon of
    undo: their positions as consumers do not keep any snapshot.
    """

    main_hash: str
    planned_at: datetime
    policy: ExpiryPolicy
    tables: tuple[PlannedTable, ...] = ()
    unreadable_tables: tuple[str, ...] = ()

    @property
    def expiring_tables(self) -> tuple[PlannedTable, ...]:
        """The tables of which at least one snapshot expires."""
        return tuple(table for table in self.tables if table.expired_count)

    @property
    def errors(self) -> Mapping[str, Exception]:
        """The errors by table name, without tables that have no error."""
        return {table.table: table.error for table in self.tables if table.error is not None}


@dataclass(frozen=True)
class ExpiredTable:
    """The outcome for one table.

    `commit` is the hash of the commit on `main`; None if no snapshot had to be removed, or if an error
    occurred. `is_gone` is true if `main` no longer has the table. Sizes are those of the metadata files
    without compression.
    """

    table: str
    commit: str | None = None
    expired_count: int = 0
    kept_count: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    given_up: tuple[GivenUpPosition, ...] = ()
    is_gone: bool = False
    error: Exception | None = None


@dataclass(frozen=True)
class ExpiryResult:
    """The outcome of an expiry. An error of one table does not stop the others.

    `unreadable_tables` has the meaning of `ExpiryPlan.unreadable_tables`, read again when the expiry began.
    """

    tables: tuple[ExpiredTable, ...] = ()
    unreadable_tables: tuple[str, ...] = ()

    @property
    def errors(self) -> Mapping[str, Exception]:
        """The errors by table name, without tables that have no error."""
        return {table.table: table.error for table in self.tables if table.error is not None}


def _given_up_to_json(positions: tuple[GivenUpPosition, ...]) -> list[dict[str, Any]]:
    return [
        {
            "consumer": position.consumer,
            "snapshot_id": position.snapshot_id,
            "snapshot_at": from_epoch_ms(position.timestamp_ms).isoformat(),
        }
        for position in positions
    ]


def expiry_plan_to_json(plan: ExpiryPlan) -> dict[str, Any]:
    """Return a plan as an object for JSON. Ages are in seconds."""
    policy = plan.policy
    return {
        "main_hash": plan.main_hash,
        "planned_at": plan.planned_at.isoformat(),
        "policy": {
            "keep_count": policy.keep_count,
            "keep_age_s": policy.keep_age.total_seconds(),
            "position_age_s": policy.position_age.total_seconds(),
            "undo_age_s": policy.undo_age.total_seconds(),
        },
        "tables": [
            {
                "table": table.table,
                "snapshots": table.snapshot_count,
                "expired_snapshots": table.expired_count,
                "metadata_bytes": table.metadata_bytes,
                "oldest_snapshot_id": table.oldest_id,
                "oldest_snapshot_at": table.oldest_at.isoformat() if table.oldest_at else None,
                "kept_by": str(table.kept_by),
                "holder": table.holder,
                "given_up_positions": _given_up_to_json(table.given_up),
                **_error_to_json(table.error),
            }
            for table in plan.tables
        ],
        "unreadable_tables": [*plan.unreadable_tables],
    }


def expiry_result_to_json(result: ExpiryResult) -> dict[str, Any]:
    """Return a result as an object for JSON."""
    return {
        "tables": [
            {
                "table": table.table,
                "commit": table.commit,
                "expired_snapshots": table.expired_count,
                "kept_snapshots": table.kept_count,
                "metadata_bytes_before": table.bytes_before,
                "metadata_bytes_after": table.bytes_after,
                "given_up_positions": _given_up_to_json(table.given_up),
                "is_gone": table.is_gone,
                **_error_to_json(table.error),
            }
            for table in result.tables
        ],
        "unreadable_tables": [*result.unreadable_tables],
    }


def _error_to_json(error: Exception | None) -> dict[str, str | None]:
    return {
        "error": type(error).__name__ if error is not None else None,
        "message": str(error) if error is not None else None,
    }


PLAN_HEADERS = ("table", "snapshots", "expire", "oldest that stays", "kept by")
RESULT_HEADERS = ("table", "expired", "stay", "metadata before", "metadata after", "notes")

_RULES = {
    KeptBy.CURRENT: "current snapshot",
    KeptBy.COUNT: "number of snapshots",
    KeptBy.AGE: "age",
    KeptBy.BASE: "needed by",
    KeptBy.POSITION: "position of",
    KeptBy.RETENTION: "retention of",
}


def list_plan_columns(table: PlannedTable) -> tuple[str, str, str, str, str]:
    """Return a planned table as the texts of one row with `PLAN_HEADERS`."""
    if table.error is not None:
        return table.table, "", "", "", f"failed: {table.error}"
    holder = table.holder or ("the table" if table.kept_by is KeptBy.RETENTION else "")
    rule = " ".join(filter(None, (_RULES[table.kept_by], holder)))
    oldest = table.oldest_at.isoformat(timespec="seconds") if table.oldest_at else ""
    return table.table, f"{table.snapshot_count:,}", f"{table.expired_count:,}", oldest, rule


def list_result_columns(table: ExpiredTable) -> tuple[str, str, str, str, str, str]:
    """Return the outcome of a table as the texts of one row with `RESULT_HEADERS`."""
    notes = []
    if table.error is not None:
        notes.append(str(table.error))
    if table.is_gone:
        notes.append("main no longer has the table")
    if table.given_up:
        consumers = ", ".join(dict.fromkeys(position.consumer for position in table.given_up))
        notes.append(f"{format_count(len(table.given_up), 'position')} given up: {consumers}")
    return (
        table.table,
        f"{table.expired_count:,}",
        f"{table.kept_count:,}",
        _format_bytes(table.bytes_before),
        _format_bytes(table.bytes_after),
        "; ".join(notes),
    )


def _format_bytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size / 1e3:,.1f} kB"
