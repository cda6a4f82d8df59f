"""What Dagster is told of several batches at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import dagster as dg

from branchlake_dagster.ingest.batch_report import combine_results, iter_check_results, offsets_table
from branchlake_dagster.ingest.declaration import Ingest, IngestTable, expand_families
from branchlake_dagster.ingest.ingest_batch import BatchResult
from branchlake_dagster.ingest.offsets import OffsetRange, TableProgress, TopicPartition
from branchlake_dagster.ingest.planning import BatchPlan
from branchlake_dagster.ingest.scan import ScanResult

ONE, OTHER = TopicPartition("t", "id", 0), TopicPartition("t", "id", 1)


def batch(ranges: dict[TopicPartition, OffsetRange], **counts: int) -> BatchResult:
    told = Counter({name.replace("__", "/"): count for name, count in counts.items()})
    nothing: Any = None
    plan, recorded = BatchPlan(ranges, 0), TableProgress({}, "c", "r")
    return BatchResult("c", nothing, plan, (), ScanResult({}, told), recorded, nothing, ("note",))


def test_batches_are_reported_together() -> None:
    first = batch({ONE: OffsetRange(0, 5)}, records=5, rows__0=4, dead=1, dead__syntax=1)
    second = batch({ONE: OffsetRange(5, 7), OTHER: OffsetRange(2, 3)}, records=3, rows__0=3)
    both = combine_results([first, second])
    assert (both.record_count, both.dead_letter_count, both.scan_result.count_rows(0)) == (8, 1, 7)
    assert both.plan.ranges == {ONE: OffsetRange(0, 7), OTHER: OffsetRange(2, 3)}
    assert both.notes == ("note",)
    rows = [dict(record.data) for record in offsets_table(both.plan.ranges).records]
    assert [(row["partition"], row["first"], row["last"]) for row in rows] == [(0, 0, 6), (1, 2, 2)]


def test_a_dead_letter_of_an_earlier_batch_is_reported_too() -> None:
    ingest = Ingest(name="i", topics=["t"], tables=[IngestTable(key="x/a")], tolerance=0.1)
    bad, good = batch({}, records=2, dead=1, dead__syntax=1), batch({}, records=2)
    told = list(
        iter_check_results(
            expand_families(ingest, {}),
            combine_results([bad, good]).scan_result.counts,
            {"x.a": ingest.tables[0]},
        )
    )[-1]
    assert not told.passed
    assert told.metadata["dead_letters/syntax"].value == 1


def test_the_other_dead_letters_are_judged_again_after_reprocessing() -> None:
    table = IngestTable(key="x/a")
    ingest = Ingest(name="i", topics=["t"], tables=[table], tolerance=0.0)
    counts = {"records": 5, "dead": 2, "dead/conversion": 2, "dead_of/x.a": 2}
    converted, tolerated = iter_check_results(
        expand_families(ingest, {}), counts, {"x.a": table}, is_reprocessing=True
    )
    assert (converted.passed, converted.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert (tolerated.passed, tolerated.description) == (
        True,
        "5 dead letters reprocessed; 2 failed again.",
    )
    counts |= {"dead/contract": 1, "dead/conversion": 1}
    blocking = replace(ingest, on_contract="block")
    converted, _ = iter_check_results(
        expand_families(blocking, {}), counts, {"x.a": table}, is_reprocessing=True
    )
    assert (converted.passed, converted.severity) == (False, dg.AssetCheckSeverity.ERROR)
