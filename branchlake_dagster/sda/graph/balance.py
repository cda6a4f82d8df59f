"""A check that every raw measurement became an observation, was rejected, or had been received before."""

# No `from __future__ import annotations`: Dagster reads the annotations of the check.
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import dagster as dg
import numpy as np
import polars as pl
from pyiceberg.catalog import Catalog
from pyiceberg.expressions import And, GreaterThanOrEqual, LessThan
from pyiceberg.table import DataScan

from branchlake_dagster import LakehouseResource
from branchlake_dagster.sda.assets.observations import OBSERVATIONS, REJECTED_OBSERVATIONS
from branchlake_dagster.sda.sensor_kinds.declaration import SensorKind

MAX_REPEATED_SHARE = 0.01
"""The largest share of measurements that may have been received before. About one in a thousand is usual."""
MAX_REPEATED = 10
"""The number of repeated measurements that is always accepted, for hours with few measurements."""


@dataclass(frozen=True)
class Balance:
    """The numbers of rows with a sensor time in one span.

    Args:
        raw: The number of measurements in the raw tables.
        observations: The number of observations.
        rejected: The number of rejected measurements.
    """

    raw: int
    observations: int
    rejected: int

    @property
    def repeated_count(self) -> int:
        """The number of raw measurements that are neither observations nor rejected.

        They were received before, or are missing. The number is negative if rejections are outdated.
        """
        return self.raw - self.observations - self.rejected

    @property
    def has_invented(self) -> bool:
        """Whether there are more observations than measurements."""
        return self.observations > self.raw

    @property
    def is_even(self) -> bool:
        """Whether at most a few measurements are missing or repeated, and none was invented."""
        return not self.has_invented and self.repeated_count <= max(
            MAX_REPEATED, MAX_REPEATED_SHARE * self.raw
        )


def balance_check(kinds: Sequence[SensorKind]) -> dg.AssetChecksDefinition:
    """Build the check `balance` for the given kinds of sensor."""

    @dg.asset_check(
        asset=OBSERVATIONS,
        additional_deps=[*(kind.raw_table for kind in kinds), REJECTED_OBSERVATIONS],
        description="Each raw measurement is an observation, rejected, or one of few that were received"
        " again.",
        metadata={"branchlake/scope": "rows"},
    )
    def balance(context: dg.AssetCheckExecutionContext, lakehouse: LakehouseResource) -> dg.AssetCheckResult:
        """Compare the numbers of rows of the run's hours, by the column `sensor_timestamp`.

        If many measurements seem to be repeated, as after a replay, the distinct ones are counted, which
        reads the ids of the hours' raw measurements. More observations than measurements are an error.
        Measurements that are neither observations nor rejected are a warning, because another run records the
        rejections, perhaps later.
        """
        window, catalog = context.op_execution_context.partition_time_window, lakehouse.catalog()
        found = count_balance(catalog, kinds, window.start, window.end)
        passed = found.is_even
        if not passed and found.repeated_count > 0:
            distinct = count_distinct_measurements(catalog, kinds, window.start, window.end)
            passed = replace(found, raw=distinct).is_even
        return dg.AssetCheckResult(
            passed=passed,
            severity=dg.AssetCheckSeverity.ERROR if found.has_invented else dg.AssetCheckSeverity.WARN,
            metadata={
                "raw_measurements": found.raw,
                "observations": found.observations,
                "rejected": found.rejected,
                "repeated": found.repeated_count,
            },
        )

    return balance


def count_balance(catalog: Catalog, kinds: Sequence[SensorKind], start: datetime, end: datetime) -> Balance:
    """Count rows with a sensor time from `start` (inclusive) to `end` (exclusive).

    A missing table counts as 0.
    """

    def count(*keys: dg.AssetKey) -> int:
        return sum(_count_rows(catalog, key, start, end) for key in keys)

    raw = count(*(kind.raw_table for kind in kinds))
    return Balance(raw, count(OBSERVATIONS), count(REJECTED_OBSERVATIONS))


def count_distinct_measurements(
    catalog: Catalog, kinds: Sequence[SensorKind], start: datetime, end: datetime
) -> int:
    """Count the distinct records with a sensor time in the span.

    Holds eight bytes per measurement in memory.
    """
    hashes = [np.empty(0, np.uint64)]
    for kind in kinds:
        columns = ("orig_sensor_id", *kind.record_id)
        if (scan := _scan_span(catalog, kind.raw_table, start, end, columns)) is not None:
            for batch in scan.to_arrow_batch_reader():
                ids = pl.DataFrame(pl.from_arrow(batch)).select(columns)
                hashes.append(np.unique(ids.hash_rows().to_numpy()))
    return len(np.unique(np.concatenate(hashes)))


def _count_rows(catalog: Catalog, key: dg.AssetKey, start: datetime, end: datetime) -> int:
    scan = _scan_span(catalog, key, start, end, ("sensor_timestamp",))
    return scan.count() if scan is not None else 0


def _scan_span(
    catalog: Catalog, key: dg.AssetKey, start: datetime, end: datetime, columns: tuple[str, ...]
) -> DataScan | None:
    """Return a scan of the rows with a sensor time in the span; None if the table does not exist."""
    identifier = tuple(key.path)
    if not catalog.table_exists(identifier):
        return None
    row_filter = And(
        GreaterThanOrEqual("sensor_timestamp", start.isoformat()),
        LessThan("sensor_timestamp", end.isoformat()),
    )
    return catalog.load_table(identifier).scan(row_filter=row_filter, selected_fields=columns)
