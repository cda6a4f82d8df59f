"""Associate Arrow batches of observations with objects, for Spark's ``mapInArrow``.

An association is the decision which object of the catalog an observation belongs to, if any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from branchlake_dagster.sda.association.associate import (
    REASON_NAMES,
    RESULT_NAMES,
    Associations,
    TrackedObservations,
    associate,
)
from branchlake_dagster.sda.association.predictions import PredictedCatalog, Rows
from branchlake_dagster.sda.association.rules import AssociationRules
from branchlake_dagster.sda.estimation.arrow import observations_of, of_known_kinds
from branchlake_dagster.sda.orbits.frames import Floats
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.sensors.models import MEASUREMENT_COLUMNS, MeasurementModel

_KEYS = ("observation_id", "source_kind", "source_id", "track_id", "sensor_timestamp", "sat_no", "max_skew_s")
OBSERVATION_INPUT = (*_KEYS, *MEASUREMENT_COLUMNS)
"""Columns of the table of observations that the association reads.

``sat_no`` is the catalog number that the observation claims.
"""

ASSOCIATION_SCHEMA = pa.schema(
    [
        pa.field("window_start", pa.timestamp("us", "UTC")),
        pa.field("observation_id", pa.string()),
        pa.field("source_kind", pa.string()),
        pa.field("source_id", pa.string()),
        pa.field("track_id", pa.string()),
        pa.field("sensor_timestamp", pa.timestamp("us", "UTC")),
        pa.field("claimed_sat_no", pa.int64()),
        pa.field("sat_no", pa.int64()),
        pa.field("result", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("normalized_distance", pa.float64()),
        pa.field("degrees_of_freedom", pa.int64()),
        pa.field("candidates", pa.int64()),
        pa.field("element_age_days", pa.float64()),
    ]
)
"""One row per observation, sorted by kind, sensor, track and time.

``normalized_distance`` is the distance of the single observation from the prediction, in standard deviations;
null if the observation has no tested object. ``reason`` explains why an observation is uncorrelated.
``element_age_days`` is the time from the epoch of the object's element set to the observation.
"""
_SORT_KEYS = [
    (name, "ascending")
    for name in ("source_kind", "source_id", "track_id", "sensor_timestamp", "observation_id")
]


def associate_batches(
    elements: Elements,
    sigma_km: Floats,
    start: int,
    end: int,
    models: Mapping[str, MeasurementModel],
    rules: AssociationRules | None = None,
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Build a function from batches of observations (`OBSERVATION_INPUT`) to batches of `ASSOCIATION_SCHEMA`.

    All rows of a sensor must come to one call, as ``repartition("source_id")`` arranges. A call holds its
    share of the window in memory, and propagates the whole catalog once (computes all objects' positions).

    Args:
        elements: One element set per object. Spark ships it with the function: 1.4 MB for 16,000 objects.
        sigma_km: (n, 3) one standard deviation of each object's position along R, T and N (radial, along the
            track, normal to the orbit's plane), km; NaN if unknown. See `PublishedErrors.position_sigma`, at
            the middle of the window.
        start: The start of the window, UTC microseconds since 1970.
        end: The end of the window. All observations lie within the window, up to the errors of their clocks.
        models: Measurement models by source kind. Observations of other kinds are left out.
        rules: The limits of the decisions. (default: `AssociationRules()`)
    """

    def associate_all(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = [batch for batch in batches if batch.num_rows]
        if held:
            table = of_known_kinds(pa.Table.from_batches(held).select(list(OBSERVATION_INPUT)), models)
            if not table.num_rows:
                return
            catalog = PredictedCatalog.predict(elements, sigma_km, start, end)
            yield from associate_table(table, catalog, start, models, rules).to_batches()

    return associate_all


def associate_table(
    table: pa.Table,
    catalog: PredictedCatalog,
    start: int,
    models: Mapping[str, MeasurementModel],
    rules: AssociationRules | None = None,
) -> pa.Table:
    """Return the associations (`ASSOCIATION_SCHEMA`) of observations (`OBSERVATION_INPUT`) in any order.

    An observation without a track is a track by itself. Every kind must have a model.
    """
    track_id = pc.coalesce(table.column("track_id"), table.column("observation_id"))
    table = table.set_column(table.schema.get_field_index("track_id"), "track_id", track_id)
    table = table.sort_by(_SORT_KEYS)
    observations = tracked_observations(table, models)
    return _association_table(table, associate(catalog, observations, rules), catalog, start)


def tracked_observations(table: pa.Table, models: Mapping[str, MeasurementModel]) -> TrackedObservations:
    """Convert a table that is sorted by kind, sensor and track to arrays.

    The column `max_skew_s`, the largest error of the sensor's clock, is taken as the half width of a uniform
    distribution; the result has its standard deviation.
    """
    sensor = _number_runs(table, ("source_kind", "source_id"))
    track = _number_runs(table, ("source_kind", "source_id", "track_id"))
    claims = pc.fill_null(table.column("sat_no"), -1).to_numpy().astype(np.int64)
    skew = table.column("max_skew_s").to_numpy().astype(np.float64)
    measured = observations_of(table, track, models)
    return TrackedObservations(measured, sensor, claims, skew / np.sqrt(3.0))


def _number_runs(table: pa.Table, names: tuple[str, ...]) -> Rows:
    """Return a number (n,) per row that is equal for adjacent rows with equal values in the given columns."""
    changes = np.zeros(table.num_rows, np.bool_)
    for name in names:
        codes = table.column(name).combine_chunks().dictionary_encode().indices.to_numpy()
        changes[1:] |= np.diff(codes) != 0
    return np.cumsum(changes).astype(np.int64)


def _association_table(
    table: pa.Table, found: Associations, catalog: PredictedCatalog, start: int
) -> pa.Table:
    micros = table.column("sensor_timestamp").cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_numpy()
    rows = catalog.usable_rows(found.sat_no)
    age = np.full(len(rows), np.nan)
    known = np.flatnonzero(rows >= 0)
    age[known] = (micros[known] - catalog.elements.epoch_micros[rows[known]]) / 86_400e6
    columns: dict[str, object] = {
        "window_start": np.full(len(rows), start),
        "claimed_sat_no": table.column("sat_no"),
        "sat_no": pa.array(found.sat_no, mask=found.sat_no < 0),
        "result": pa.array(RESULT_NAMES).take(pa.array(found.result)),
        "reason": pa.array([None, *REASON_NAMES[1:]]).take(pa.array(found.reason)),
        "normalized_distance": pa.array(found.distance, from_pandas=True),
        "degrees_of_freedom": found.degrees_of_freedom,
        "candidates": found.candidates,
        "element_age_days": pa.array(age, from_pandas=True),
    }
    arrays = []
    for field in ASSOCIATION_SCHEMA:
        column = columns.get(field.name)
        values = table.column(field.name) if column is None else column
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        arrays.append((values if isinstance(values, pa.Array) else pa.array(values)).cast(field.type))
    return pa.Table.from_arrays(arrays, schema=ASSOCIATION_SCHEMA)
