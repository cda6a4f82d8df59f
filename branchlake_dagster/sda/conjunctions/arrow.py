"""Convert close approaches to Arrow batches, and merge the rows that several tasks have of one event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import polars as pl
import pyarrow as pa

from branchlake_dagster.sda.conjunctions.screening import Encounters, Kind
from branchlake_dagster.sda.orbits.propagation import Elements

_MAX_BATCH_ROWS = 50_000

ENCOUNTER_SCHEMA = pa.schema(
    [
        pa.field("kind", pa.string()),
        pa.field("tca", pa.timestamp("us", "UTC")),
        pa.field("sat1_object_designator", pa.int64()),
        pa.field("sat2_object_designator", pa.int64()),
        pa.field("miss_distance_km", pa.float64()),
        pa.field("relative_speed_km_s", pa.float64()),
        *(pa.field(f"relative_position_{axis}_km", pa.float64()) for axis in "rtn"),
        *(pa.field(f"relative_velocity_{axis}_km_s", pa.float64()) for axis in "rtn"),
        pa.field("together_min", pa.int64()),
        pa.field("sat1_element_epoch", pa.timestamp("us", "UTC")),
        pa.field("sat2_element_epoch", pa.timestamp("us", "UTC")),
    ]
)
"""Columns of close approaches.

The names are those of the Conjunction Data Message (CCSDS 508.0-B) with units added; CDM itself uses m and
m/s. `tca` is the time of closest approach. Sat 1 is the object with the smaller catalog number. Relative
positions and velocities are along sat 1's axes R (radial), T (along the track) and N (normal to the orbit's
plane). COLLISION_PROBABILITY is not among them: element sets have no covariance, and readers would take an
assumed one for a measured one.
"""


def as_batch(found: Encounters, elements: Elements) -> pa.RecordBatch:
    """Convert close approaches to a batch of `ENCOUNTER_SCHEMA`.

    `elements` are the screened element sets, to which the rows of `found` refer.
    """
    columns = [
        found.kinds,
        found.tca_micros,
        elements.sat_no[found.first],
        elements.sat_no[found.second],
        found.miss_km,
        np.linalg.norm(found.velocity, axis=1),
        *found.position.T,
        *found.velocity.T,
        found.minutes,
        elements.epoch_micros[found.first],
        elements.epoch_micros[found.second],
    ]
    arrays = [pa.array(c).cast(f.type) for c, f in zip(columns, ENCOUNTER_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ENCOUNTER_SCHEMA)


PAIR = ("sat1_object_designator", "sat2_object_designator")
"""The columns that identify a pair of objects."""
_NEAREST = sorted(
    (name for name in ENCOUNTER_SCHEMA.names if name not in ("kind", *PAIR, "together_min")),
    key=lambda name: (name != "miss_distance_km", name != "tca"),
)
"""The columns by which the nearest of several rows of a `together` event is chosen, in this order."""


def merge_together(found: pl.DataFrame) -> pl.DataFrame:
    """Merge the rows of each pair that stays close (kind `together`) into one row with the closest moment.

    Several tasks may have rows of this kind for one pair, because each task screens a part of the time. The
    minutes are added. Only one task finds any other event, so all other rows are returned unchanged.

    Args:
        found: Close approaches with the columns of `ENCOUNTER_SCHEMA`. If it has a row of a pair, it has all
            rows of that pair.
    """
    is_together = pl.col("kind") == Kind.TOGETHER.value
    merged = (
        found.filter(is_together)
        .sort(_NEAREST)
        .group_by("kind", *PAIR, maintain_order=True)
        .agg(pl.col("together_min").sum(), pl.col(_NEAREST).first())
        .select(found.columns)
    )
    return pl.concat([found.filter(~is_together), merged])


def merge_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Merge rows of the kind `together` in batches of `ENCOUNTER_SCHEMA`, as `merge_together`.

    All rows of a pair must be in one partition.
    """
    filled_batches = [batch for batch in batches if batch.num_rows]
    if filled_batches:
        # Spark delivers times in the time zone of the session.
        rows = pa.Table.from_batches(filled_batches).cast(ENCOUNTER_SCHEMA)
        merged = merge_together(pl.DataFrame(pl.from_arrow(rows)))
        table = merged.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(ENCOUNTER_SCHEMA)
        yield from table.to_batches(max_chunksize=_MAX_BATCH_ROWS)
