"""Plans and results of the maintenance as sections of text and rows, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from branchlake_dagster.compaction import summary as compaction_summary
from branchlake_dagster.expiry import result as expiry_result
from branchlake_dagster.expiry.manifest_rewrite import RewrittenManifests
from branchlake_dagster.expiry.result import ExpiryPlan, ExpiryResult
from branchlake_dagster.garbage_collection import summary as collection_summary
from branchlake_dagster.maintenance.maintenance_result import (
    MaintenancePart,
    MaintenancePlan,
    MaintenanceResult,
)
from branchlake_dagster.wording import format_count


@dataclass(frozen=True)
class Section:
    """One part of a plan or result: sentences, and the headers and rows of a table, which may be empty."""

    part: MaintenancePart
    sentence: str
    headers: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()

    def to_markdown(self, max_rows: int = 100) -> str:
        """Return the section as Markdown with at most `max_rows` rows and the number of the other rows."""
        lines = [self.sentence]
        if self.rows:
            lines += ["", _markdown_row(self.headers), "|---" * len(self.headers) + "|"]
            lines += [_markdown_row(row) for row in self.rows[:max_rows]]
        if (others := len(self.rows) - max_rows) > 0:
            lines += ["", f"{format_count(others, 'other row')}."]
        return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def list_plan_sections(plan: MaintenancePlan) -> list[Section]:
    """Return a section for each part that was planned or failed, the failed parts first."""
    sections = [_error_section(part, error) for part, error in plan.errors.items()]
    if plan.compaction is not None:
        sections.append(
            Section(
                MaintenancePart.COMPACTION,
                compaction_summary.format_plan(plan.compaction),
                compaction_summary.PLAN_HEADERS,
                compaction_summary.list_plan_rows(plan.compaction),
            )
        )
    if plan.expiry is not None:
        rows = [
            expiry_result.list_plan_columns(table)
            for table in plan.expiry.tables
            if table.expired_count or table.error is not None
        ]
        sentence = _format_expiry_plan(plan.expiry)
        sections.append(Section(MaintenancePart.EXPIRY, sentence, expiry_result.PLAN_HEADERS, rows))
    if plan.collection is not None:
        sections.append(
            Section(
                MaintenancePart.COLLECTION,
                collection_summary.format_plan(plan.collection),
                collection_summary.TABLE_HEADERS,
                collection_summary.list_table_rows(plan.collection),
            )
        )
    return sections


def list_result_sections(result: MaintenanceResult) -> list[Section]:
    """Return a section for each part that ran or failed, the failed parts first.

    Merged manifests have a section of their own.
    """
    sections = [_error_section(part, error) for part, error in result.errors.items()]
    if result.compaction is not None:
        sections.append(
            Section(
                MaintenancePart.COMPACTION,
                compaction_summary.format_result(result.compaction),
                compaction_summary.RESULT_HEADERS,
                compaction_summary.list_result_rows(result.compaction),
            )
        )
    if result.expiry is not None:
        rows = [expiry_result.list_result_columns(table) for table in result.expiry.tables]
        sentence = _format_expiry_result(result.expiry)
        sections.append(Section(MaintenancePart.EXPIRY, sentence, expiry_result.RESULT_HEADERS, rows))
    if result.manifests:
        sections.append(_manifests_section(result.manifests))
    if result.collection is not None:
        sections.append(
            Section(
                MaintenancePart.COLLECTION,
                collection_summary.format_result(result.collection),
                collection_summary.TABLE_HEADERS,
                collection_summary.list_table_rows(result.collection.plan),
            )
        )
    return sections


_MANIFEST_HEADERS = ("table", "manifests before", "after", "notes")


def _manifests_section(tables: Sequence[RewrittenManifests]) -> Section:
    merged = [table for table in tables if table.commit is not None]
    rows = [
        (
            table.table,
            f"{table.count_before:,}",
            f"{table.count_after:,}",
            "" if table.error is None else f"failed: {table.error}",
        )
        for table in tables
    ]
    sentence = f"Manifests of {format_count(len(merged), 'table')} merged."
    return Section(MaintenancePart.EXPIRY, sentence, _MANIFEST_HEADERS, rows)


def _error_section(part: MaintenancePart, error: Exception) -> Section:
    return Section(part, f"The {part} failed: {error}")


def _format_expiry_plan(plan: ExpiryPlan) -> str:
    count = sum(table.expired_count for table in plan.expiring_tables)
    tables = format_count(len(plan.expiring_tables), "table")
    sentence = (
        f"{format_count(count, 'snapshot')} of {tables} can expire."
        if count
        else "No snapshot is due to expire."
    )
    if plan.errors:
        sentence += f" {format_count(len(plan.errors), 'table')} cannot be read."
    return sentence + _format_unreadable(plan.unreadable_tables)


def _format_expiry_result(result: ExpiryResult) -> str:
    committed = [table for table in result.tables if table.commit is not None]
    count = sum(table.expired_count for table in committed)
    sentence = f"{format_count(count, 'snapshot')} of {format_count(len(committed), 'table')} expired."
    if result.errors:
        sentence += f" {format_count(len(result.errors), 'table')} failed."
    return sentence + _format_unreadable(result.unreadable_tables)


def _format_unreadable(tables: Sequence[str]) -> str:
    if not tables:
        return ""
    return (
        " Positions in these tables keep no snapshots, because their metadata files are missing or damaged:"
        f" {', '.join(tables)}."
    )


def plan_to_json(plan: MaintenancePlan) -> dict[str, Any]:
    """Return a plan as the dict that `branchlake maintain plan --json` prints."""
    return {
        "compaction": plan.compaction and compaction_summary.plan_to_json(plan.compaction),
        "expiry": plan.expiry and expiry_result.expiry_plan_to_json(plan.expiry),
        "collection": plan.collection and collection_summary.plan_to_json(plan.collection),
        "errors": _errors_to_json(plan.errors),
    }


def result_to_json(result: MaintenanceResult) -> dict[str, Any]:
    """Return a result as the dict that `branchlake maintain run --json` prints."""
    return {
        "compaction": result.compaction and compaction_summary.result_to_json(result.compaction),
        "expiry": result.expiry and expiry_result.expiry_result_to_json(result.expiry),
        "manifests": [
            {
                "table": table.table,
                "commit": table.commit,
                "manifests_before": table.count_before,
                "manifests_after": table.count_after,
                "error": type(table.error).__name__ if table.error is not None else None,
            }
            for table in result.manifests
        ],
        "collection": result.collection and collection_summary.result_to_json(result.collection),
        "errors": _errors_to_json(result.errors),
    }


def _errors_to_json(errors: Mapping[MaintenancePart, Exception]) -> list[dict[str, str]]:
    return [
        {"part": str(part), "error": type(error).__name__, "message": str(error)}
        for part, error in errors.items()
    ]
