"""Formats an undo as sentences, as a table and as JSON, for the command and for the job's page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from branchlake_dagster.errors import format_first_values
from branchlake_dagster.undo.result import Undo, UndoneTable, format_dependency
from branchlake_dagster.undo.stale_readers import Recomputation, StaleReader, StaleReaders
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


READER_HEADERS = ("computed from undone rows", "partitions", "read", "by run", "gets correct rows")
_RECOMPUTATIONS = {
    Recomputation.BY_ITSELF: "by itself: a sensor or condition launches it",
    Recomputation.REBUILD: "by a rebuild; until then its runs fail with RowsRemoved",
    Recomputation.MATERIALIZE: "when it is materialized again",
    Recomputation.UNDO_ITS_RUNS: "if its runs, which appended rows, are undone too",
    Recomputation.IGNORED: "not from removed rows: it ignores them, as declared",
    Recomputation.UNKNOWN: "unknown: no loaded code location has its asset",
}


def list_reader_columns(reader: StaleReader, backfill_id: str | None) -> tuple[str, str, str, str, str]:
    """Return the cells of a stale reader's row, in the order of `READER_HEADERS`.

    `backfill_id` is the backfill that was requested to compute it again; None if there is none.
    """
    recomputation = _RECOMPUTATIONS[reader.recomputation]
    if reader.after:
        recomputation += f", after {', '.join(reader.after)}"
    if backfill_id is not None:
        recomputation = f"by backfill {backfill_id}"
    partitions = "unknown" if reader.partitions is None else format_first_values(reader.partitions)
    return (
        reader.table,
        partitions,
        ", ".join(reader.inputs),
        format_first_values(reader.run_ids),
        recomputation,
    )


def format_readers(stale: StaleReaders, backfills: Mapping[str, str]) -> str:
    """Return sentences about tables whose state is not known, and about what to do; empty if all is known.

    `backfills` has the ids of requested backfills by table.
    """
    sentences = []
    if any(reader.can_be_requested and reader.table not in backfills for reader in stale.readers):
        sentences.append("--recompute requests backfills of the tables that do not recompute themselves.")
    if not stale.knows_code:
        sentences.append(
            "No code location was loaded, so assets that read whole tables are not listed. Name it with -m."
        )
    sentences += [
        f"Table {table.table} may have been computed from the undone rows: {table.trouble}."
        for table in stale.unreadable_tables
    ]
    return " ".join(sentences)


def format_reader_table(stale: StaleReaders, backfills: Mapping[str, str]) -> str:
    """Return the stale readers as Markdown. `backfills` has the ids of requested backfills by table."""
    lines = ["| " + " | ".join(READER_HEADERS) + " |", "|---|---|---|---|---|"]
    lines += [
        "| " + " | ".join(list_reader_columns(reader, backfills.get(reader.table))) + " |"
        for reader in stale.readers
    ]
    return "\n".join(lines) if stale.readers else "no table"


def undo_to_json(undo: Undo, stale: StaleReaders, backfills: Mapping[str, str]) -> dict[str, Any]:
    """Return the JSON object that `branchlake undo --json` prints.

    `backfills` has the ids of requested backfills by table.
    """
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
        "stale_readers": [
            {
                "table": reader.table,
                "asset": reader.asset.to_user_string() if reader.asset is not None else None,
                "partitions": list(reader.partitions) if reader.partitions is not None else None,
                "inputs": list(reader.inputs),
                "run_ids": list(reader.run_ids),
                "recomputation": str(reader.recomputation),
                "after": list(reader.after),
                "backfill": backfills.get(reader.table),
            }
            for reader in stale.readers
        ],
        "unreadable_tables": [
            {"table": table.table, "reason": table.trouble} for table in stale.unreadable_tables
        ],
        "code_loaded": stale.knows_code,
    }
