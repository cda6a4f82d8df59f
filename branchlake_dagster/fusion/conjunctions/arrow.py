"""Conjunction candidates as a function over Arrow batches, for Spark's ``mapInArrow``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pyarrow as pa

from branchlake_dagster.fusion.conjunctions.screening import screen
from branchlake_dagster.fusion.orbits.propagation import Elements

CANDIDATE_SCHEMA = pa.schema(
    [
        pa.field("window_start", pa.timestamp("us", "UTC")),
        pa.field("tca", pa.timestamp("us", "UTC")),
        pa.field("sat1_object_designator", pa.int64()),
        pa.field("sat2_object_designator", pa.int64()),
        pa.field("miss_distance_km", pa.float64()),
        pa.field("relative_speed_km_s", pa.float64()),
        *(pa.field(f"relative_position_{axis}_km", pa.float64()) for axis in "rtn"),
        pa.field("sat1_element_epoch", pa.timestamp("us", "UTC")),
        pa.field("sat2_element_epoch", pa.timestamp("us", "UTC")),
    ]
)
"""Names of the Conjunction Data Message (CCSDS 508.0-B) with units added; CDM itself uses m and m/s. Sat 1
is the object with the smaller catalogue number. There is no COLLISION_PROBABILITY: element sets carry no
covariance, and an invented one would be read as a measured one."""


def screen_batches(
    elements: Elements, *, start: int, step_s: float, threshold_km: float
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function from batches of cell ranges (``first_cell``, ``cells``) to ``CANDIDATE_SCHEMA`` batches.

    ``elements`` are sorted by ``sat_no`` and travel with the function. ``start`` is the window's start in
    UTC microseconds since 1970, cell 0 begins there.
    """
    step = round(step_s * 1e6)

    def candidates(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for first, cells in zip(
                batch.column("first_cell").to_pylist(), batch.column("cells").to_pylist(), strict=True
            ):
                yield _candidates(elements, start, start + first * step, cells, step_s, threshold_km)

    return candidates


def _candidates(
    elements: Elements, window: int, start: int, cells: int, step_s: float, threshold_km: float
) -> pa.RecordBatch:
    found = screen(elements, start=start, cells=cells, step_s=step_s, threshold_km=threshold_km)
    columns = [
        np.full(len(found.first), window),
        found.tca_micros,
        elements.sat_no[found.first],
        elements.sat_no[found.second],
        found.miss_km,
        found.speed_km_s,
        *found.relative_ric.T,
        elements.epoch_micros[found.first],
        elements.epoch_micros[found.second],
    ]
    arrays = [pa.array(c).cast(f.type) for c, f in zip(columns, CANDIDATE_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=CANDIDATE_SCHEMA)
