"""Counters of the maintenance: what adds to them, how they are stored, and Prometheus' text."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from branchlake_dagster.cli.main import main as command
from branchlake_dagster.compaction.errors import CompactionRowsDiffer, RewriteFailed
from branchlake_dagster.compaction.result import CompactedPartition, CompactedTable, CompactionResult
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.expiry.manifest_rewrite import RewrittenManifests
from branchlake_dagster.expiry.result import ExpiredTable, ExpiryResult
from branchlake_dagster.garbage_collection.collection_plan import (
    CollectionPlan,
    CollectionResult,
    ExecutedPlan,
)
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.maintenance import metrics
from branchlake_dagster.maintenance.maintenance_result import MaintenancePart, MaintenanceResult
from branchlake_dagster.maintenance.maintenance_run import run_maintenance
from branchlake_dagster.maintenance.metrics import (
    METRICS_FILE,
    MaintenanceMetrics,
    TableCounter,
    load_metrics,
    record_result,
)
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse
NOW = datetime(2026, 11, 27, tzinfo=UTC)
PARTITION = CompactedPartition("day=a", 4, 400, 1, 390, 8, 0)
NO_PLAN = CollectionPlan("", NOW, NOW, 0, 0, "")
RESULT = MaintenanceResult(
    CompactionResult((CompactedTable("shop.t", "c1", (PARTITION, PARTITION)),)),
    ExpiryResult((ExpiredTable("shop.t", "c2", expired_count=3), ExpiredTable("shop.u"))),
    collection=CollectionResult(
        "p",
        NOW,
        NOW,
        (
            ExecutedPlan("a", "executed", 5, deleted_by_table={"shop.t": 4, "": 1}),
            ExecutedPlan("b", "open", 2, deleted_by_table={"shop.t": 2}),
        ),
        NO_PLAN,
    ),
)


def samples(text: str) -> dict[tuple[str, str], float]:
    """The values by name and label, read by Prometheus' own parser."""
    return {
        (sample.name, next(iter(sample.labels.values()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_runs_add_up(tmp_path: Path) -> None:
    record_result(tmp_path, RESULT, NOW)
    record_result(tmp_path, RESULT, NOW)
    assert samples(load_metrics(tmp_path).format_text()) == {
        ("files_compacted_total", "shop.t"): 16,
        ("snapshots_expired_total", "shop.t"): 6,
        ("snapshots_expired_total", "shop.u"): 0,
        ("orphans_cleaned_total", "shop.t"): 12,
        ("orphans_cleaned_total", ""): 2,
        ("lineage_validation_failures_total", "shop.t"): 0,
        **{("branchlake_maintenance_failures_total", part): 0 for part in MaintenancePart},
        **{
            ("branchlake_maintenance_last_success_timestamp_seconds", part): NOW.timestamp()
            for part in MaintenancePart
        },
    }


def test_failures_are_counted_by_part() -> None:
    counts = MaintenanceMetrics()
    rows_differ = CompactedTable("shop.t", error=CompactionRowsDiffer("rows", partitions=("day=a",)))
    failed_rewrite = CompactedTable("shop.u", error=RewriteFailed("no memory", table="u"))
    manifests = (RewrittenManifests("shop.t", error=OSError("disk")),)
    counts.add(
        MaintenanceResult(
            CompactionResult((rows_differ, failed_rewrite)),
            ExpiryResult(),
            manifests,
            errors={MaintenancePart.COLLECTION: OSError("down")},
        ),
        NOW,
    )
    assert counts.failures == dict.fromkeys(MaintenancePart, 1)
    assert counts.last_success == {}
    lineage = TableCounter.LINEAGE_VALIDATION_FAILURES
    assert {table: count for (name, table), count in counts.tables.items() if name == lineage} == {
        "shop.t": 1,
        "shop.u": 0,
    }


def test_a_part_that_did_not_run_is_left_out() -> None:
    counts = MaintenanceMetrics()
    counts.add(MaintenanceResult(expiry=ExpiryResult()), NOW)
    assert counts.last_success == {MaintenancePart.EXPIRY: NOW.timestamp()}
    assert counts.failures == {}


def test_hostile_table_names_are_escaped() -> None:
    name = 'shop.a"b\\c\nd é{}='
    counts = MaintenanceMetrics()
    counts.tables[TableCounter.FILES_COMPACTED, name] = 1
    assert samples(counts.format_text()) == {("files_compacted_total", name): 1}


def test_processes_that_record_at_once_lose_nothing(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: record_result(tmp_path, RESULT, NOW), range(40)))
    assert load_metrics(tmp_path).tables[TableCounter.FILES_COMPACTED, "shop.t"] == 320


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"tables": {"a": 1}, "failures": {}}',
        "null",
        '{"tables": {"a": {"t": 1e999}}, "failures": {}, "last_success": {}}',
    ],
)
def test_a_damaged_file_starts_at_zero(tmp_path: Path, content: str) -> None:
    (tmp_path / METRICS_FILE).write_text(content)
    assert load_metrics(tmp_path) == MaintenanceMetrics()
    record_result(tmp_path, RESULT, NOW)
    assert load_metrics(tmp_path).tables[TableCounter.FILES_COMPACTED, "shop.t"] == 8


def test_a_run_records_its_metrics_and_the_command_prints_them(lakehouse: Lakehouse, namespace: str) -> None:
    run_maintenance(lakehouse, [MaintenancePart.EXPIRY], now=lambda: NOW)
    environment = {"BRANCHLAKE_STATE_DIR": str(lakehouse.settings.state_dir)}
    result = CliRunner().invoke(command, ["maintain", "metrics"], env=environment)
    assert result.exit_code == 0, result.output
    succeeded = samples(result.output)["branchlake_maintenance_last_success_timestamp_seconds", "expiry"]
    assert succeeded == NOW.timestamp()
    assert json.loads((lakehouse.settings.state_dir / METRICS_FILE).read_text())["failures"] == {}


@pytest.mark.parametrize("error", [ConfigurationError("no folder"), PermissionError("read-only")])
def test_a_state_folder_that_is_not_writable_stops_no_maintenance(
    lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(_: Path) -> None:
        raise error

    monkeypatch.setattr(metrics, "make_state_folder", refuse)
    sentences: list[str] = []
    result = run_maintenance(lakehouse, [MaintenancePart.EXPIRY], progress=sentences.append)
    assert not result.has_failed
    assert any(str(lakehouse.settings.state_dir) in sentence for sentence in sentences)
