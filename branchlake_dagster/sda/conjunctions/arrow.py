"""Close approaches as Arrow batches."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from branchlake_dagster.sda.conjunctions.screening import Encounters
from branchlake_dagster.sda.orbits.propagation import Elements

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
"""Names of the Conjunction Data Message (CCSDS 508.0-B) with units added; CDM itself uses m and m/s. Sat 1
is the object with the smaller catalogue number. There is no COLLISION_PROBABILITY: element sets carry no
covariance, and an invented one would be read as a measured one."""


def as_batch(found: Encounters, elements: Elements) -> pa.RecordBatch:
    """Close approaches with the columns of `ENCOUNTER_SCHEMA`."""
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
