"""Plans and results of compactions as sentences, as printed rows, and as JSON."""

from __future__ import annotations

from typing import Any

from branchlake_dagster.compaction.compaction_plan import MEBIBYTE, CompactionPlan, PlannedPartition
from branchlake_dagster.compaction.result import CompactedTable, CompactionResult
from branchlake_dagster.wording import format_count

PLAN_HEADERS = ("table", "partition", "files", "after", "MiB to read", "delete files", "why")


def list_plan_rows(plan: CompactionPlan) -> list[tuple[str, ...]]:
    """Return a row with `PLAN_HEADERS` for each planned partition, then for each skipped partition."""
    rows = [_list_planned(planned) for planned in plan.partitions]
    for skipped in plan.skipped:
        measured = skipped.measured
        rows.append(
            (
                measured.table,
                measured.partition or "(whole table)",
                f"{measured.files:,}",
                "-",
                "-",
                f"{measured.delete_files:,}",
                f"left for later: {skipped.reason}",
            )
        )
    return rows


def _list_planned(planned: PlannedPartition) -> tuple[str, ...]:
    measured = planned.measured
    return (
        measured.table,
        measured.partition or "(whole table)",
        f"{planned.files:,}",
        f"{planned.expected_files:,}",
        f"{planned.bytes / MEBIBYTE:,.1f}",
        f"{measured.delete_files:,}",
        str(planned.reason),
    )


def format_plan(plan: CompactionPlan) -> str:
    """Format a plan as sentences: planned, skipped and unreadable partitions."""
    if not plan.partitions:
        return "No partition is due for a compaction." + _format_skipped(plan) + _format_unreadable(plan)
    files = sum(planned.files for planned in plan.partitions)
    expected = sum(planned.expected_files for planned in plan.partitions)
    return (
        f"{format_count(len(plan.partitions), 'partition')} of {format_count(len(plan.tables), 'table')}:"
        f" {format_count(files, 'file')} become about {expected:,},"
        f" {plan.bytes / MEBIBYTE:,.1f} MiB are read." + _format_skipped(plan) + _format_unreadable(plan)
    )


def _format_skipped(plan: CompactionPlan) -> str:
    return f" {format_count(len(plan.skipped), 'partition')} skipped for now." if plan.skipped else ""


def _format_unreadable(plan: CompactionPlan) -> str:
    return "".join(f" {name} cannot be read: {error}" for name, error in plan.unreadable.items())


RESULT_HEADERS = ("table", "partitions", "files before", "files after", "rows", "commit", "notes")


def list_result_rows(result: CompactionResult) -> list[tuple[str, ...]]:
    """Return a row with `RESULT_HEADERS` for each table: its committed files and rows, and notes."""
    return [
        (
            table.table,
            f"{len(table.partitions):,}",
            f"{sum(one.removed_files for one in table.partitions):,}",
            f"{sum(one.added_files for one in table.partitions):,}",
            f"{sum(one.rows for one in table.partitions):,}",
            table.commit[:16] if table.commit else "none",
            _format_notes(table),
        )
        for table in result.tables
    ]


def _format_notes(table: CompactedTable) -> str:
    notes = [f"failed: {table.error}"] if table.error is not None else []
    reasons: dict[str, list[str]] = {}
    for one in table.left:
        reasons.setdefault(str(one.reason), []).append(one.partition)
    notes += [f"{format_count(len(names), 'partition')} left: {reason}" for reason, names in reasons.items()]
    return "; ".join(notes)


def format_result(result: CompactionResult) -> str:
    """Format a result as sentences: committed files, failed tables, and the reason for an early stop."""
    committed = [table for table in result.tables if table.commit]
    removed = sum(one.removed_files for table in committed for one in table.partitions)
    added = sum(one.added_files for table in committed for one in table.partitions)
    sentences = [
        f"{format_count(len(committed), 'table')} compacted:"
        f" {format_count(removed, 'file')} became {added:,}."
        if committed
        else "Nothing was committed."
    ]
    if result.errors:
        sentences.append(f"{format_count(len(result.errors), 'table')} failed.")
    if result.stopped is not None:
        sentences.append(f"Stopped early: {result.stopped}.")
    return " ".join(sentences)


def plan_to_json(plan: CompactionPlan) -> dict[str, Any]:
    """Return a plan as a dict for JSON. Each `reason` is the code of the reason, not its sentence."""
    return {
        "strategy": str(plan.options.strategy),
        "bytes": plan.bytes,
        "healthy": plan.healthy,
        "partitions": [
            {
                "table": planned.measured.table,
                "partition": planned.measured.partition,
                "reason": planned.reason.code,
                "files": planned.files,
                "expected_files": planned.expected_files,
                "bytes": planned.bytes,
                "delete_files": planned.measured.delete_files,
                "dangling_deletes": planned.measured.dangling_deletes,
            }
            for planned in plan.partitions
        ],
        "skipped": [
            {
                "table": skipped.measured.table,
                "partition": skipped.measured.partition,
                "reason": skipped.reason.code,
            }
            for skipped in plan.skipped
        ],
        "unreadable": [
            {"table": name, "error": type(error).__name__, "message": str(error)}
            for name, error in plan.unreadable.items()
        ],
    }


def result_to_json(result: CompactionResult) -> dict[str, Any]:
    """Return a result as a dict for JSON.

    `stopped` and each `reason` are the codes of the reasons, not their sentences. Each `error` is the name of
    the error's class.
    """
    return {
        "stopped": result.stopped.code if result.stopped is not None else None,
        "seconds": round(result.seconds, 3),
        "removed_branches": list(result.removed_branches),
        "tables": [
            {
                "table": table.table,
                "commit": table.commit,
                "is_rebased": table.is_rebased,
                "error": type(table.error).__name__ if table.error is not None else None,
                "read_bytes": table.read_bytes,
                "seconds": round(table.seconds, 3),
                "rewrite_seconds": round(table.rewrite_seconds, 3),
                "proof_seconds": round(table.proof_seconds, 3),
                "partitions": [
                    {
                        "partition": one.partition,
                        "removed_files": one.removed_files,
                        "removed_bytes": one.removed_bytes,
                        "added_files": one.added_files,
                        "added_bytes": one.added_bytes,
                        "rows": one.rows,
                        "folded_rows": one.folded_rows,
                    }
                    for one in table.partitions
                ],
                "left": [{"partition": one.partition, "reason": one.reason.code} for one in table.left],
            }
            for table in result.tables
        ],
    }
