"""Find objects whose states cannot be true, by a function over Arrow batches for Spark's ``mapInArrow``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pyarrow as pa

from branchlake_dagster.sda.orbits.plausible import Fault, find_state_faults
from branchlake_dagster.sda.orbits.propagation import (
    ELEMENT_FIELDS,
    Elements,
    propagate_satellites,
    time_grid,
)

STEP_S = 60.0
_DAY_MICROS = 86_400e6
_UTC = pa.timestamp("us", "UTC")

QUARANTINE_INPUT = ("sat_no", "snapshot_id", "epoch", *ELEMENT_FIELDS)
"""Columns of the catalog that `quarantine_batches` reads."""

QUARANTINE_SCHEMA = pa.schema(
    [
        pa.field("window_start", _UTC),
        pa.field("sat_no", pa.int64()),
        pa.field("reason", pa.string()),
        pa.field("at", _UTC),
        pa.field("altitude_km", pa.float64()),
        pa.field("energy_ratio", pa.float64()),
        pa.field("snapshot_id", pa.string()),
        pa.field("element_epoch", _UTC),
        pa.field("element_age_days", pa.float64()),
    ]
)
"""One row per object with an implausible state; altitude and energy are null if SGP4 gives no state."""


def quarantine_batches(
    start: int, end: int
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function from batches of ``QUARANTINE_INPUT`` to batches of ``QUARANTINE_SCHEMA``.

    Each row depends on its own element set only. `start` and `end` are the window in microseconds since 1970
    UTC.
    """

    def quarantine(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield _quarantine_batch(batch, start, end)

    return quarantine


def _quarantine_batch(batch: pa.RecordBatch, start: int, end: int) -> pa.RecordBatch:
    elements = Elements.from_arrow(pa.Table.from_batches([batch]))
    instants = time_grid(start, end, STEP_S)
    faults = find_state_faults(propagate_satellites(elements.to_satrec_array(), instants), elements)
    rows = np.flatnonzero(~faults.plausible_objects)
    at = faults.first_faulty_instant()[rows]
    epochs = elements.epoch_micros[rows]
    names = pa.array([fault.name.lower() for fault in Fault])
    columns = [
        pa.array(np.full(len(rows), start), pa.int64()).cast(_UTC),
        pa.array(elements.sat_no[rows], pa.int64()),
        names.take(pa.array(faults.fault[rows, at].astype(np.int64))),
        pa.array(instants[at], pa.int64()).cast(_UTC),
        pa.array(faults.altitude_km[rows, at], pa.float64(), from_pandas=True),
        pa.array(faults.energy_ratio[rows, at], pa.float64(), from_pandas=True),
        batch.column("snapshot_id").take(pa.array(rows)).cast(pa.string()),
        pa.array(epochs, pa.int64()).cast(_UTC),
        pa.array((start - epochs) / _DAY_MICROS, pa.float64()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=QUARANTINE_SCHEMA)
