"""Convert close approaches to Arrow batches."""

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
