"""Counters of the maintenance for Prometheus: `branchlake maintain metrics`.

The counters are in a JSON file in the state folder, and every run of the maintenance adds to them. They count
the work of commands and Dagster runs that use this state folder. If several machines maintain a lake, each
has its own counters, and a query in Prometheus adds them up.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from branchlake_dagster.compaction.errors import CompactionRowsDiffer
from branchlake_dagster.embedded.state_folder import make_state_folder
from branchlake_dagster.file_lock import file_lock
from branchlake_dagster.maintenance.maintenance_result import MaintenancePart, MaintenanceResult

METRICS_FILE = "maintenance-metrics.json"


class TableCounter(StrEnum):
    """The counters with the label `table`, by their names in Prometheus."""

    FILES_COMPACTED = "files_compacted_total"
    SNAPSHOTS_EXPIRED = "snapshots_expired_total"
    ORPHANS_CLEANED = "orphans_cleaned_total"
    LINEAGE_VALIDATION_FAILURES = "lineage_validation_failures_total"


_HELP = {
    TableCounter.FILES_COMPACTED: "Data files that a compaction replaced.",
    TableCounter.SNAPSHOTS_EXPIRED: "Snapshots that an expiry removed.",
    TableCounter.ORPHANS_CLEANED: "Unreachable files that a collection deleted.",
    TableCounter.LINEAGE_VALIDATION_FAILURES: "Compactions that were not published because rows differed.",
}
_FAILURES = "branchlake_maintenance_failures_total"
_LAST_SUCCESS = "branchlake_maintenance_last_success_timestamp_seconds"


@dataclass
class MaintenanceMetrics:
    """Counts since the file was created.

    `tables` maps a pair of counter and table name to a count. `failures` maps a part to the number of its
    runs in which the part, a table or a file failed. `last_success` maps a part to the time of its last run
    without failure, in seconds since 1970.
    """

    tables: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    last_success: dict[str, float] = field(default_factory=dict)

    def add(self, result: MaintenanceResult, now: datetime) -> None:
        """Add the counts of a run that ended at `now`."""
        self.tables.update(_count_work(result))
        for part, has_failed in result.failures.items():
            if has_failed:
                self.failures[part] += 1
            else:
                self.last_success[part] = now.timestamp()

    def to_json(self) -> dict[str, Any]:
        """Return the metrics as JSON."""
        tables: dict[str, dict[str, int]] = {}
        for (counter, table), count in sorted(self.tables.items()):
            tables.setdefault(counter, {})[table] = count
        return {"tables": tables, "failures": dict(self.failures), "last_success": self.last_success}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> MaintenanceMetrics:
        """Parse the output of `to_json`.

        Raises ValueError, TypeError, KeyError, AttributeError or OverflowError.
        """
        tables = {
            (counter, table): int(count)
            for counter, counts in document["tables"].items()
            for table, count in counts.items()
        }
        failures = {part: int(count) for part, count in document["failures"].items()}
        last_success = {part: float(time) for part, time in document["last_success"].items()}
        return cls(Counter(tables), Counter(failures), last_success)

    def format_text(self) -> str:
        """Return the metrics in Prometheus' text format, with one line per counter and table or part."""
        lines: list[str] = []
        for counter in TableCounter:
            lines += [f"# HELP {counter} {_HELP[counter]}", f"# TYPE {counter} counter"]
            counts = sorted((table, count) for (name, table), count in self.tables.items() if name == counter)
            lines += [f'{counter}{{table="{_escape_label(table)}"}} {count}' for table, count in counts]
        parts = [str(part) for part in MaintenancePart if part in self.failures or part in self.last_success]
        lines += [
            f"# HELP {_FAILURES} Runs of a part in which something failed.",
            f"# TYPE {_FAILURES} counter",
        ]
        lines += [f'{_FAILURES}{{part="{part}"}} {self.failures[part]}' for part in parts]
        lines += [
            f"# HELP {_LAST_SUCCESS} When the part last ran without failure.",
            f"# TYPE {_LAST_SUCCESS} gauge",
        ]
        lines += [
            f'{_LAST_SUCCESS}{{part="{part}"}} {self.last_success[part]:.3f}'
            for part in parts
            if part in self.last_success
        ]
        return "\n".join(lines) + "\n"


def _count_work(result: MaintenanceResult) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for compacted in result.compaction.tables if result.compaction is not None else ():
        counts[TableCounter.FILES_COMPACTED, compacted.table] += sum(
            partition.removed_files for partition in compacted.partitions
        )
        counts[TableCounter.LINEAGE_VALIDATION_FAILURES, compacted.table] += isinstance(
            compacted.error, CompactionRowsDiffer
        )
    for expired in result.expiry.tables if result.expiry is not None else ():
        counts[TableCounter.SNAPSHOTS_EXPIRED, expired.table] += expired.expired_count
    for executed in result.collection.executed if result.collection is not None else ():
        for table, count in executed.deleted_by_table.items():
            counts[TableCounter.ORPHANS_CLEANED, table] += count
    return counts


def _escape_label(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def load_metrics(state_dir: Path) -> MaintenanceMetrics:
    """Read the metrics from a state folder. They are empty if the file does not exist or is damaged.

    Prometheus treats a counter that falls to zero as restarted. Raises OSError.
    """
    try:
        return MaintenanceMetrics.from_json(json.loads((state_dir / METRICS_FILE).read_text()))
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return MaintenanceMetrics()


def record_result(state_dir: Path, result: MaintenanceResult, now: datetime) -> MaintenanceMetrics:
    """Add a run to the metrics in a state folder, and return the new metrics.

    Processes of one machine may call this at the same time.

    Raises ConfigurationError or OSError if the folder or the file cannot be created or written.
    """
    path = state_dir / METRICS_FILE
    make_state_folder(state_dir)
    with file_lock(state_dir / f"{METRICS_FILE}.lock"):
        metrics = load_metrics(state_dir)
        metrics.add(result, now)
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps(metrics.to_json(), indent=1))
        scratch.replace(path)
    return metrics
