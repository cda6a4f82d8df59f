"""Formats an undo as sentences, as a table and as JSON, for the command and for the job's page."""

from __future__ import annotations

from typing import Any

from branchlake_dagster.undo.result import Undo, UndoneTable, format_dependency
from branchlake_dagster.wording import format_count, format_names


def format_undo(undo: Undo, *, dry_run: bool) -> str:
    """Return sentences that describe a committed undo or, with `dry_run`, a planned one."""
    run_ids = list(dict.fromkeys(publication.run_id for publication in undo.publications))
    count = format_count(len(undo.publications), "publication")
    runs = format_names("run", run_ids)
    if undo.dependencies:
        reasons = "; ".join(format_dependency(dependency) for dependency in undo.dependencies)
        return f"{count} of {runs} cannot be undone alone. {reasons}."
    if undo.commit is not None and not undo.is_new:
        return f"Undone before: {count} of {runs}, as {undo.commit}."
    if dry_run:
        return f"{count} of {runs} would be undone."
    if undo.commit is None:
        return f"Nothing is left of {count} of {runs}: later publications have replaced or dropped all of it."
    return f"{count} of {runs} undone as {undo.commit}."


def list_columns(table: UndoneTable) -> tuple[str, str, str, str, str]:
    """Return the cells of the table's row, in the order of `HEADERS`."""
    notes = []
    if table.removed_delete_files:
        notes.append(f"removes {format_count(table.removed_delete_files, 'delete file')}")
    if table.restores_spec:
        notes.append("earlier partition spec")
    if table.properties:
        notes.append("earlier values of " + ", ".join(table.properties))
    if table.superseded_by:
        notes.append("replaced by " + format_names("run", table.superseded_by))
    return (
        table.table,
        table.action,
        _format_rows(table.removed_rows, table.removed_files),
        _format_rows(table.restored_rows, table.restored_files),
        "; ".join(notes),
    )


def _format_rows(rows: int | None, files: int) -> str:
    if rows is None:
        return f"unknown, in {format_count(files, 'file')}" if files else "unknown"
    return f"{rows:,} in {format_count(files, 'file')}" if files else "0"


HEADERS = ("table", "action", "rows removed", "rows restored", "notes")


def format_undo_table(undo: Undo) -> str:
    """Return the tables of an undo as Markdown."""
    lines = ["| " + " | ".join(HEADERS) + " |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(list_columns(table)) + " |" for table in undo.tables]
    return "\n".join(lines) if undo.tables else "no table"


def format_publications(undo: Undo) -> str:
    """Return the publications of an undo as Markdown, newest first."""
    return "\n".join(
        f"- {publication.hash[:16]}, run {publication.run_id}: {', '.join(publication.tables)}"
        for publication in undo.publications
    )


def undo_to_json(undo: Undo) -> dict[str, Any]:
    """Return the JSON object that `branchlake undo --json` prints."""
    return {
        "commit": undo.commit,
        "is_new": undo.is_new,
        "publications": [
            {
                "publication": publication.hash,
                "run_id": publication.run_id,
                "tables": list(publication.tables),
            }
            for publication in undo.publications
        ],
        "tables": [
            {
                "table": table.table,
                "action": table.action,
                "removed_files": table.removed_files,
                "removed_rows": table.removed_rows,
                "restored_files": table.restored_files,
                "restored_rows": table.restored_rows,
                "properties": list(table.properties),
                "superseded_by": list(table.superseded_by),
                "removed_delete_files": table.removed_delete_files,
                "restores_spec": table.restores_spec,
            }
            for table in undo.tables
        ],
        "dependencies": [
            {
                "table": dependency.table,
                "code": dependency.reason.code,
                "reason": str(dependency.reason),
                "partitions": list(dependency.partitions),
                "run_ids": list(dependency.run_ids),
            }
            for dependency in undo.dependencies
        ],
    }
