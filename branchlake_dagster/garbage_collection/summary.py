"""Plans, results and explanations of the garbage collection as JSON and as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from branchlake_dagster.garbage_collection.collection_plan import (
    CollectionPlan,
    CollectionResult,
    CollectionStatus,
    OpenPlan,
    PlannedFile,
    metrics_to_json,
)
from branchlake_dagster.garbage_collection.explanation import FileExplanation, MomentExplanation
from branchlake_dagster.garbage_collection.warehouse_files import to_time
from branchlake_dagster.wording import format_count, format_names

TABLE_HEADERS = ("table", "files", "size")
PLAN_HEADERS = ("plan", "created", "due", "files", "size")
HOLDER_HEADERS = ("reference", "commit", "table", "snapshots")
_SHOWN_FILES = 3


def format_size(size_bytes: int) -> str:
    """Format a number of bytes: `1.5 MB`."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def format_plan(plan: CollectionPlan) -> str:
    """Format a plan as sentences: compared files, planned files, and reasons why files are kept."""
    metrics = plan.metrics
    listed = (
        f"{format_count(metrics.listed_files, 'file')} in {format_count(metrics.listed_folders, 'folder')}"
    )
    checked = f"{format_count(metrics.references, 'reference')} and {format_count(metrics.commits, 'commit')}"
    sentences = [f"{listed} were compared with {checked}."]
    if plan.file_count:
        files = format_count(plan.file_count, "file")
        due = f" from {_format_time(plan.due_at)} on" if plan.plan_id else ""
        sentences.append(f"{files}, {format_size(plan.size_bytes)}, can be deleted{due}.")
    else:
        sentences.append("No file can be planned for deletion.")
    if metrics.claimants:
        sentences.append(f"Files that {format_names('writer', metrics.claimants)} may have written are kept.")
    if metrics.unreadable_states:
        names = _format_files("table metadata", metrics.unreadable_states)
        sentences.append(f"Nothing is planned or deleted, because {names} cannot be read.")
    elif metrics.unreadable:
        names = _format_files("metadata", metrics.unreadable)
        sentences.append(f"All files of some tables are kept, because {names} cannot be read.")
    if metrics.left_files:
        files = format_count(metrics.left_files, "further file")
        sentences.append(f"{files} will be planned by the next pass.")
    if metrics.skipped_folders:
        folders = format_count(metrics.skipped_folders, "folder")
        sentences.append(f"{folders} will be listed by the next pass, because the budget ended.")
    return " ".join(sentences)


def _format_files(kind: str, locations: Sequence[str]) -> str:
    others = len(locations) - _SHOWN_FILES
    more = f" and {format_count(others, 'other file')}" if others > 0 else ""
    return f"{kind} {', '.join(locations[:_SHOWN_FILES])}{more}"


def format_result(result: CollectionResult) -> str:
    """Format the result of a pass as sentences: the executed plans, then the new plan."""
    sentences = []
    for executed in result.executed:
        deleted = f"{format_count(executed.deleted, 'file')} deleted, {format_size(executed.deleted_bytes)}"
        others = f"{executed.missing:,} missing, {executed.kept:,} kept, {executed.failed:,} failed"
        sentences.append(f"Plan {executed.plan_id[:8]} is {executed.state}: {deleted}; {others}.")
    return " ".join([*sentences, format_plan(result.plan)])


def list_table_rows(plan: CollectionPlan) -> list[tuple[str, str, str]]:
    """Return a row per table for `TABLE_HEADERS`, the tables with the most bytes first."""
    by_size = sorted(plan.files_by_table.items(), key=lambda item: -item[1][1])
    return [(table or "(unknown)", f"{count:,}", format_size(size)) for table, (count, size) in by_size]


def list_plan_rows(plans: Sequence[OpenPlan]) -> list[tuple[str, str, str, str, str]]:
    """Return a row per open plan for `PLAN_HEADERS`."""
    return [
        (
            plan.plan_id[:8],
            _format_time(plan.created_at),
            _format_time(plan.due_at),
            f"{plan.file_count:,}",
            format_size(plan.size_bytes),
        )
        for plan in plans
    ]


def list_holder_rows(explanation: FileExplanation) -> list[tuple[str, str, str, str]]:
    """Return a row per holder of a file for `HOLDER_HEADERS`."""
    return [
        (
            holder.reference,
            holder.commit[:16],
            holder.table,
            ", ".join(map(str, holder.snapshot_ids)) or "all",
        )
        for holder in explanation.holders
    ]


def format_explanation(explanation: FileExplanation | MomentExplanation) -> str:
    """Format the answer of `FileCollector.explain` as sentences."""
    if isinstance(explanation, MomentExplanation):
        return _format_moment(explanation)
    path = explanation.path
    if explanation.holders:
        names = list(dict.fromkeys(holder.reference for holder in explanation.holders))
        return f"{path} is kept by {format_names('reference', names)}."
    sentences = [f"No reference leads to {path}."]
    if explanation.unreachable_since is not None:
        sentences.append(f"This was first found on {_format_time(explanation.unreachable_since)}.")
    if explanation.last_root:
        sentences.append(f"The file was {explanation.last_root}.")
    if explanation.due_at is not None:
        sentences.append(f"It is planned for deletion from {_format_time(explanation.due_at)} on.")
    if not explanation.exists:
        sentences.append("The file does not exist.")
    return " ".join(sentences)


def _format_moment(explanation: MomentExplanation) -> str:
    moment = _format_time(explanation.moment)
    oldest = _format_time(explanation.oldest_moment) if explanation.oldest_moment else "unknown"
    if explanation.commit is None:
        return f"Main has no commit at {moment} or earlier."
    if explanation.expired:
        return f"{explanation.table} at {moment} is expired. The oldest moment that can be read is {oldest}."
    if not explanation.exists:
        return f"Main had no table {explanation.table} at {moment}."
    return f"{explanation.table} at {moment} can be read, at commit {explanation.commit[:16]}."


def _format_time(moment: datetime) -> str:
    return moment.isoformat(timespec="minutes").replace("+00:00", "Z")


def plan_to_json(plan: CollectionPlan) -> dict[str, Any]:
    """Return a plan as JSON."""
    return {
        "plan_id": plan.plan_id,
        "created_at": plan.created_at.isoformat(),
        "due_at": plan.due_at.isoformat(),
        "file_count": plan.file_count,
        "size_bytes": plan.size_bytes,
        "digest": plan.digest,
        "tables": [
            {"table": table, "file_count": count, "size_bytes": size}
            for table, (count, size) in plan.files_by_table.items()
        ],
        "sample": [_file_to_json(file) for file in plan.sample],
        "metrics": metrics_to_json(plan.metrics),
    }


def _file_to_json(file: PlannedFile) -> dict[str, Any]:
    return {
        "path": file.path,
        "table": file.table,
        "reason": file.reason,
        "size_bytes": file.size,
        "modified_at": to_time(file.modified_us).isoformat(),
        "last_root": file.last_root,
    }


def result_to_json(result: CollectionResult) -> dict[str, Any]:
    """Return the result of a pass as JSON."""
    return {
        "pass_id": result.pass_id,
        "started_at": result.started_at.isoformat(),
        "ended_at": result.ended_at.isoformat(),
        "executed": [
            {
                "plan_id": executed.plan_id,
                "state": executed.state,
                "deleted": executed.deleted,
                "deleted_bytes": executed.deleted_bytes,
                "missing": executed.missing,
                "kept": executed.kept,
                "failed": executed.failed,
                "errors": list(executed.errors),
            }
            for executed in result.executed
        ],
        "plan": plan_to_json(result.plan),
    }


def status_to_json(status: CollectionStatus) -> dict[str, Any]:
    """Return the summary of the journal as JSON."""
    started, ended = status.last_pass_started_at, status.last_pass_ended_at
    return {
        "open_plans": [
            {
                "plan_id": plan.plan_id,
                "created_at": plan.created_at.isoformat(),
                "due_at": plan.due_at.isoformat(),
                "file_count": plan.file_count,
                "size_bytes": plan.size_bytes,
            }
            for plan in status.open_plans
        ],
        "passes": status.passes,
        "last_pass_started_at": started.isoformat() if started else None,
        "last_pass_ended_at": ended.isoformat() if ended else None,
        "last_metrics": dict(status.last_metrics),
        "deleted_files": status.deleted_files,
        "deleted_bytes": status.deleted_bytes,
    }


def explanation_to_json(explanation: FileExplanation | MomentExplanation) -> dict[str, Any]:
    """Return the answer of `FileCollector.explain` as JSON. `kind` is `file` or `moment`."""
    if isinstance(explanation, MomentExplanation):
        oldest = explanation.oldest_moment
        return {
            "kind": "moment",
            "table": explanation.table,
            "moment": explanation.moment.isoformat(),
            "commit": explanation.commit,
            "exists": explanation.exists,
            "expired": explanation.expired,
            "oldest_moment": oldest.isoformat() if oldest else None,
        }
    times = {
        "modified_at": explanation.modified_at,
        "unreachable_since": explanation.unreachable_since,
        "due_at": explanation.due_at,
    }
    return {
        "kind": "file",
        "path": explanation.path,
        "exists": explanation.exists,
        "size_bytes": explanation.size,
        "state": explanation.state,
        "last_root": explanation.last_root,
        **{name: moment.isoformat() if moment else None for name, moment in times.items()},
        "holders": [
            {
                "reference": holder.reference,
                "commit": holder.commit,
                "table": holder.table,
                "metadata_location": holder.metadata_location,
                "snapshot_ids": list(holder.snapshot_ids),
            }
            for holder in explanation.holders
        ],
        "unreadable": list(explanation.unreadable),
    }
