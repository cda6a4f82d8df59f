"""What Dagster is told of a batch: metadata by table, and the checks' results. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import dagster as dg
from dagster import MetadataValue

from branchlake_dagster.ingest.declaration import Expanded, Ingest
from branchlake_dagster.ingest.ingest_batch import BatchResult
from branchlake_dagster.ingest.offsets import OffsetRange, Ranges, TopicPartition, in_words
from branchlake_dagster.stored_names import AssetMetadata, EventMetadata
from branchlake_dagster.wording import counted

CONVERTED = "converted"
"""The check on each table: its records became rows."""
TOLERATED = "tolerated"
"""The check on the dead letters: not more than the ingestion tolerates."""


def check_specs(ingest: Ingest) -> list[dg.AssetCheckSpec]:
    """The checks of all its tables."""
    scope = {AssetMetadata.CHECK_SCOPE: "rows"}
    blocks = "blocks the batch" if ingest.on_contract == "block" else "warns"
    tables = [
        dg.AssetCheckSpec(
            CONVERTED,
            asset=table.asset,
            description="Every record that is meant for the table became a row of it. One that did not is a"
            f" dead letter; a broken contract {blocks}.",
            metadata=scope,
        )
        for table in ingest.tables
        if not table.is_family
    ]
    share = f"at most {ingest.tolerance:.2%} of a batch"
    return [
        *tables,
        dg.AssetCheckSpec(
            TOLERATED,
            asset=ingest.dead_letters_asset,
            description=f"Dead letters are {share}.",
            metadata=scope,
        ),
    ]


def check_results(
    ingest: Expanded, counts: Mapping[str, int], names: Iterable[str], *, again: bool = False
) -> Iterator[dg.AssetCheckResult]:
    """The verdicts on a batch by what its pass has counted; `names` are its tables' dotted names, in order.

    With `again` the records are dead letters that are put back: those that fail again are lost to nobody, and
    nothing is said against the others. A broken contract blocks them as it blocks new records.
    """
    broken = counts.get("dead/contract", 0) if ingest.on_contract == "block" else 0
    for table, name in zip(ingest.tables, names, strict=False):
        dead = counts.get(f"dead_of/{name}", 0)
        blocks = bool(broken and dead)
        yield dg.AssetCheckResult(
            asset_key=table.asset,
            check_name=CONVERTED,
            passed=not dead,
            severity=dg.AssetCheckSeverity.ERROR if blocks else dg.AssetCheckSeverity.WARN,
            description=f"{counted(dead, 'record')} for this table could not be converted." if dead else None,
            metadata={"failing_rows": dead},
        )
    dead, records = counts.get("dead", 0), counts.get("records", 0)
    share = dead / records if records else 0.0
    kinds = {
        name.removeprefix("dead/"): count
        for name, count in sorted(counts.items())
        if name.startswith("dead/")
    }
    failed = f"Of {counted(records, 'dead letter')} that were put back {dead} failed again."
    yield dg.AssetCheckResult(
        asset_key=ingest.dead_letters_asset,
        check_name=TOLERATED,
        passed=again or share <= ingest.tolerance,
        severity=dg.AssetCheckSeverity.ERROR,
        description=failed if again else _tolerated(dead, records, share, ingest.tolerance),
        metadata={"failing_rows": dead, **{f"dead_letters/{kind}": count for kind, count in kinds.items()}},
    )


def evaluation(result: dg.AssetCheckResult) -> dg.AssetCheckEvaluation:
    """The same as an event, for an asset that has no definition or is written by a plain op."""
    assert result.asset_key is not None  # noqa: S101 - each of ours names its asset and check
    return dg.AssetCheckEvaluation(
        asset_key=result.asset_key,
        check_name=result.check_name or CONVERTED,
        passed=bool(result.passed),
        severity=result.severity,
        description=result.description,
        metadata=result.metadata,
    )


def _tolerated(dead: int, records: int, share: float, tolerance: float) -> str | None:
    if not dead:
        return None
    told = f"{counted(dead, 'dead letter')} among {counted(records, 'record')} ({share:.2%})"
    return f"{told}; {tolerance:.2%} is tolerated."


def blocked_because(result: BatchResult) -> str | None:
    """Why a batch may not be published; None: it may."""
    failed = [
        one
        for one in check_results(result.ingest, result.scanned.counts, [one.name for one in result.targets])
        if not one.passed and one.severity is dg.AssetCheckSeverity.ERROR
    ]
    return "; ".join((one.description or one.check_name or "").rstrip(".") for one in failed) or None


def combined(results: Sequence[BatchResult]) -> BatchResult:
    """Batches that followed each other, at least one, as though they were one: the last, with all records."""
    last = results[-1]
    counts: Counter[str] = Counter()
    ranges: dict[TopicPartition, OffsetRange] = {}
    for one in results:
        counts += one.scanned.counts
        for place, span in one.plan.ranges.items():
            first = ranges.get(place, span)
            ranges[place] = OffsetRange(min(first.start, span.start), max(first.end, span.end))
    notes = tuple(dict.fromkeys(note for one in results for note in one.notes))
    plan, scanned = replace(last.plan, ranges=ranges), replace(last.scanned, counts=counts)
    return replace(last, plan=plan, scanned=scanned, notes=notes)


def table_metadata_of(result: BatchResult, number: int) -> dict[str, Any]:
    """What is told of one table of a batch."""
    target = result.targets[number]
    last = number == len(result.targets) - 1
    rows = result.dead if last else result.scanned.rows(number)
    found: dict[str, Any] = {
        EventMetadata.ROWS_OF_BATCH: MetadataValue.int(rows),
        EventMetadata.COMMIT_ID: MetadataValue.text(result.commit_id),
        EventMetadata.TABLE: MetadataValue.text(target.name),
    }
    return {**found, **batch_metadata(result)}


def batch_metadata(result: BatchResult) -> dict[str, Any]:
    """What is told of the batch on each of its tables."""
    found: dict[str, Any] = {
        EventMetadata.OFFSETS: offsets_table(result.plan.ranges),
        EventMetadata.LAG: MetadataValue.int(result.plan.lag),
        EventMetadata.RECORDS: MetadataValue.int(result.records),
        EventMetadata.DEAD_LETTERS: MetadataValue.int(result.dead),
    }
    if result.recorded.valid_through_ms is not None:
        found[EventMetadata.VALID_THROUGH] = MetadataValue.timestamp(moment(result.recorded.valid_through_ms))
    if result.notes:
        found[EventMetadata.NOTES] = MetadataValue.md("\n".join(f"- {note}" for note in result.notes))
    return found


def offsets_table(ranges: Ranges) -> dg.TableMetadataValue | dg.TextMetadataValue:
    """The offsets of a batch by topic and partition, both ends included."""
    records = [
        dg.TableRecord(
            {"topic": one.topic, "partition": one.partition, "first": span.start, "last": span.end - 1}
        )
        for one, span in sorted(ranges.items())
    ]
    return MetadataValue.table(records) if records else MetadataValue.text("none")


def sentence(result: BatchResult) -> str:
    """One line for the run's log."""
    dead = f", {counted(result.dead, 'dead letter')}" if result.dead else ""
    return (
        f"{in_words(result.plan.ranges)}: {counted(result.records, 'record')}{dead}, {result.plan.lag} left."
    )


def moment(ms: int) -> datetime:
    """A time in ms since 1970."""
    return datetime.fromtimestamp(ms / 1000, UTC)
