"""Associations as a function over Arrow batches, for Spark's ``mapInArrow``."""

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
"""Columns of the envelope that the association reads. ``sat_no`` is the claim."""

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

``normalized_distance`` is that of the observation by itself, null without a tested object. ``reason`` says
why an observation is uncorrelated. ``element_age_days`` is the time from the epoch of the object's element
set to the observation.
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
    share of the window in memory, and propagates the whole catalog once.

    Args:
        elements: one element set per object; 1.4 MB of the function for 16,000 objects.
        sigma_km: (n, 3) one sigma of each object along R, T and N; NaN if unknown. See
            `PublishedErrors.position_sigma`, at the middle of the window.
        start: the start of the window, UTC microseconds since 1970.
        end: its end. All observations lie within the window, up to the errors of their clocks.
        models: measurement models by source kind. Observations of other kinds are left out.
        rules: the gates, by default `AssociationRules()`.

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
    """Build the arrays of a table that is sorted by kind, sensor and track.

    The largest error of a clock is taken as the half width of a uniform distribution.
    """
    sensor = _number_runs(table, ("source_kind", "source_id"))
    track = _number_runs(table, ("source_kind", "source_id", "track_id"))
    claims = pc.fill_null(table.column("sat_no"), -1).to_numpy().astype(np.int64)
    skew = table.column("max_skew_s").to_numpy().astype(np.float64)
    measured = observations_of(table, track, models)
    return TrackedObservations(measured, sensor, claims, skew / np.sqrt(3.0))


def _number_runs(table: pa.Table, names: tuple[str, ...]) -> Rows:
    """Number the runs of equal values (n,) in some columns."""
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
