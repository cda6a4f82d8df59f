"""The parts that only Spark can run: the envelope of observations, and the functions for workers."""

import hashlib
import uuid
import zlib
from dataclasses import replace
from datetime import UTC, date, datetime
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from branchlake_dagster.sda.conjunctions.arrow import ENCOUNTER_SCHEMA, as_batch
from branchlake_dagster.sda.conjunctions.distributed import close_approaches, list_conjunctions
from branchlake_dagster.sda.conjunctions.listing import CONJUNCTION_SCHEMA, LIST_INPUT_SCHEMA, ListBuilder
from branchlake_dagster.sda.conjunctions.rescreening import EarlierLimits, Rescreening, plan
from branchlake_dagster.sda.conjunctions.screening import MINUTE, Span, screen
from branchlake_dagster.sda.conjunctions.tasks import Pairs, Screening, in_parts
from branchlake_dagster.sda.contracts import Observation, RejectedObservation
from branchlake_dagster.sda.contracts.observations import REJECTION_REASONS
from branchlake_dagster.sda.ephemerides.distributed import FileScreening, screen_files
from branchlake_dagster.sda.ephemerides.listing import screened_file
from branchlake_dagster.sda.estimation.arrow import ELEMENT_INPUT, fuse_batches
from branchlake_dagster.sda.estimation.prior import ElementPrior
from branchlake_dagster.sda.gp.simulated import simulated_elements
from branchlake_dagster.sda.messages.errors import UnreadableMessage
from branchlake_dagster.sda.messages.oem_read import read_oem
from branchlake_dagster.sda.observations.envelope import (
    OBSERVATION_NAMESPACE,
    build_observations,
    build_rejected_observations,
    identify_measurements,
)
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.sensor_kinds.registered import DEFAULT_SENSOR_KINDS
from branchlake_dagster.sda.sensors.native import SOURCE_KINDS
from branchlake_dagster.sda.sensors.simulate import simulate
from branchlake_dagster.sda.shipping import pickle_by_value
from branchlake_dagster.sda.trust.radii import ObjectRadii
from branchlake_dagster.sda.wire.links import decode_links, encode_links
from branchlake_dagster.sda.wire.optical import decode_optical, encode_optical
from branchlake_dagster.sda.wire.radar import decode_radar, encode_radar
from branchlake_dagster_tests.sda.test_ephemerides import NOON, message, segment
from branchlake_dagster_tests.sda.test_tracks import (
    END,
    MODELS,
    SEED,
    START,
    TRACK_SCHEMA,
    catalogue,
    envelope,
    fuse,
)
from branchlake_dagster_tests.suite.raised import raising

__all__ = ["catalogue"]

pytestmark = pytest.mark.spark

BY = [(name, "ascending") for name in ("sat1_object_designator", "sat2_object_designator", "kind", "tca")]


@pytest.fixture(scope="module")
def session(lakehouse):
    made = lakehouse.spark_session()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def native(catalogue) -> pl.DataFrame:
    elements = Elements.from_arrow(catalogue.to_arrow())
    return pl.concat(
        [simulate(elements, kind=kind, start=START, end=END, seed=SEED) for kind in SOURCE_KINDS]
    )


def raw_rows(native: pl.DataFrame, kind: str) -> pl.DataFrame:
    """The rows of a raw table, as the ingestion would make them of the measurements' bytes."""
    encode, decode = {
        "radar": (encode_radar, decode_radar),
        "optical": (encode_optical, decode_optical),
        "isl": (encode_links, decode_links),
    }[kind]
    sent = native.filter(pl.col("source_kind") == kind)
    values = encode(sent)
    decoded, reasons = decode(values)
    assert reasons.null_count == len(reasons)
    received = (
        (sent["received_ns"] // 1_000_000).cast(pl.Datetime("ms", "UTC")).cast(pl.Datetime("us", "UTC"))
    )
    return (
        pl.DataFrame(pl.from_arrow(decoded))
        .with_columns(
            received_at=received,
            topic_partition=pl.lit(0, pl.Int32),
            topic_offset=pl.int_range(sent.height, dtype=pl.Int64),
            frame_digest=pl.Series([hashlib.sha256(value).hexdigest() for value in values.to_pylist()]),
        )
        .drop("source_kind")
    )


@pytest.fixture(scope="module")
def raw(native) -> dict[str, pl.DataFrame]:
    return {kind: raw_rows(native, kind) for kind in SOURCE_KINDS}


@pytest.fixture(scope="module")
def objects(catalogue) -> pl.DataFrame:
    return catalogue.select("sat_no", state=pl.lit("tracked"), decay_date=pl.lit(None, pl.Date))


def identified(session, raw: dict[str, pl.DataFrame], objects: pl.DataFrame):
    frames = {kind: session.createDataFrame(rows.to_arrow()) for kind, rows in raw.items()}
    return identify_measurements(frames, session.createDataFrame(objects.to_arrow()), DEFAULT_SENSOR_KINDS)


@pytest.fixture(scope="module")
def observed(session, raw, objects):
    return build_observations(identified(session, raw, objects), data_mode="SIMULATED")


def test_observations_have_uuid5_units_and_skew(native, raw, observed):
    rows = pl.DataFrame(pl.from_arrow(observed.toArrow()))
    assert rows.height == native.height
    assert rows["observation_id"].n_unique() == rows.height
    assert set(rows["data_mode"]) == {"SIMULATED"}
    for kind in SOURCE_KINDS:
        given = raw[kind].row(0, named=True)
        optical = f"{given.get('obs_id')}|{given['timestamp_ns']}"
        record = optical if kind == "optical" else given["frame_digest"]
        name = f"{kind}|{given['orig_sensor_id']}|{record}"
        (row,) = rows.filter(
            pl.col("observation_id") == str(uuid.uuid5(OBSERVATION_NAMESPACE, name))
        ).to_dicts()
        assert row["sat_no"] == given["sat_no"]
        skew = {
            "radar": 1e-6,
            "optical": 0.010 + 0.001 * (given["clock_sync_age_s"] // 60),
            "isl": 1e-4 * given["clock_sync_age_s"],
        }
        assert row["max_skew_s"] == pytest.approx(skew[kind])
    order = ("source_kind", "sensor_timestamp", "range_km", "ra_deg", "pos_x_km")
    usual, same = envelope(native).sort(order), rows.sort(order)
    for column in usual.columns:
        if usual.schema[column] == pl.Float64:
            # A radar's frame has its uncertainties in 32 bits.
            rounded = 1e-7 if column.endswith(("_unc_km", "_unc_km_s", "_unc_deg")) else 1e-12
            np.testing.assert_allclose(same[column].to_numpy(), usual[column].to_numpy(), rtol=rounded)


def test_the_envelope_is_its_contract_column_by_column(session, raw, objects, observed):
    rejected = build_rejected_observations(identified(session, raw, objects))
    for frame, contract in ((observed, Observation), (rejected, RejectedObservation)):
        promised = contract.to_schema().columns
        assert [(one.name, one.dataType) for one in frame.schema] == [
            (name, column.dtype.type) for name, column in promised.items()
        ]


def test_what_is_received_again_is_one_observation_whatever_the_order(session, raw, objects):
    radar = raw["radar"].head(20)
    later = pl.col("received_at") + pl.duration(seconds=3)
    twice = pl.concat([radar, radar.head(5).with_columns(later, topic_offset=pl.col("topic_offset") + 1_000)])
    few = {"radar": twice, "optical": raw["optical"].head(3), "isl": raw["isl"].head(3)}

    def rows(given):
        made = build_observations(identified(session, given, objects), data_mode="REAL")
        return pl.DataFrame(pl.from_arrow(made.toArrow())).sort("observation_id")

    found = rows(few)
    assert found.height == 26
    shuffled = {kind: one.sample(fraction=1.0, shuffle=True, seed=5) for kind, one in few.items()}
    assert rows(shuffled).equals(found)
    first = found.filter(pl.col("source_kind") == "radar")["ingest_timestamp"].sort()
    assert first.equals(radar["received_at"].sort(), check_names=False)


def test_one_kind_of_sensor_is_enough(session, raw, objects):
    nothing = session.createDataFrame([], StructType([]))
    frames = {"radar": nothing, "optical": session.createDataFrame(raw["optical"].to_arrow()), "isl": nothing}
    found = identify_measurements(frames, session.createDataFrame(objects.to_arrow()), DEFAULT_SENSOR_KINDS)
    assert build_observations(found, data_mode="REAL").count() == raw["optical"].height


def test_each_measurement_that_cannot_be_true_has_its_reason(session, raw, objects):
    radar, isl = raw["radar"].head(12), raw["isl"].head(7)
    early = datetime(2026, 8, 7, 23, tzinfo=UTC)
    numbers = pl.int_range(pl.len())

    def nth(number: int, value: pl.Expr, column: str) -> pl.Expr:
        return pl.when(numbers == number).then(value).otherwise(pl.col(column)).alias(column)

    radar = radar.with_columns(
        nth(2, pl.lit(30_000.0), "range_rate_m_s"),
        nth(6, pl.lit(6e8), "range_m"),
        nth(7, pl.lit(-0.001), "el_rad"),
        nth(8, pl.lit(1e30), "sigma_range_m"),
        sensor_timestamp=pl.when(numbers == 0)
        .then(pl.lit(early))
        .when(numbers == 1)
        .then(pl.col("received_at") + pl.duration(milliseconds=5))
        .otherwise("sensor_timestamp"),
    )
    radar = radar.with_columns(
        nth(9, pl.lit(1e-322), "range_m"),
        nth(10, pl.lit(1e-200), "sigma_range_m"),
        nth(11, pl.lit(2.0), "el_rad"),
    )
    isl = (
        isl.with_columns(nth(0, pl.col("x_m") * 0.1, "x_m"), nth(1, pl.lit(3e8), "vx_m_s"))
        .with_columns(nth(2, pl.lit(1e161), "x_m"))
        .with_columns(nth(0, pl.col("y_m") * 0.1, "y_m"))
        .with_columns(nth(0, pl.col("z_m") * 0.1, "z_m"))
        .with_columns(
            pl.when(numbers.is_between(3, 5))
            .then(pl.Series([0, 0, 0, 999_999, 123_456, 123_457, 0], dtype=pl.Int64))
            .otherwise("sat_no")
            .alias("sat_no")
        )
    )
    gone = {
        "sat_no": [123_456, 123_457],
        "state": ["decayed"] * 2,
        "decay_date": [date(2026, 8, 1), date(2026, 9, 1)],
    }
    dead = pl.concat([objects, pl.DataFrame(gone)])
    found = identified(session, {"radar": radar, "optical": raw["optical"].head(2), "isl": isl}, dead)
    rejected = pl.DataFrame(pl.from_arrow(build_rejected_observations(found).toArrow()))
    told = dict(
        rejected.select(pl.concat_str("source_kind", pl.lit(" "), "topic_offset"), "reason").iter_rows()
    )
    assert told == {
        "radar 0": "before_first_window",
        "radar 1": "time_beyond_skew",
        "radar 2": "impossible_range_rate",
        "isl 3": "unknown_object",
        "isl 4": "decommissioned_object",
        "radar 6": "impossible_range",
        "radar 7": "below_horizon",
        "radar 8": "implausible_uncertainty",
        "radar 9": "impossible_range",
        "radar 10": "implausible_uncertainty",
        "radar 11": "impossible_direction",
        "isl 2": "impossible_position",
        "isl 0": "below_surface",
        "isl 1": "faster_than_light",
    }
    assert {*told.values()} == {*REJECTION_REASONS}
    assert build_observations(found, data_mode="REAL").count() == 3 + 2 + 2


def test_tracks_over_spark_are_those_of_the_function(session, native, catalogue):
    native, catalogue = (frame.filter(pl.col("sat_no") % 4 == 0) for frame in (native, catalogue))
    elements = session.createDataFrame(catalogue.select(ELEMENT_INPUT).to_arrow())
    observed = session.createDataFrame(envelope(native).to_arrow())
    joined = observed.join(elements, on="sat_no").repartition("sat_no")
    sat_no = catalogue["sat_no"].to_numpy()
    prior = ElementPrior.from_sigma(sat_no, np.tile([0.2, 1.0, 0.2], (len(sat_no), 1)), 1.5)
    counts = []
    for errors in (None, prior):
        function = pickle_by_value(fuse_batches(START, END, MODELS, errors))
        tracks = joined.mapInArrow(function, from_arrow_schema(TRACK_SCHEMA)).toArrow().sort_by("sat_no")
        expected = fuse(native, catalogue, prior=errors)
        np.testing.assert_allclose(tracks.column("x_km"), expected.column("x_km"), atol=1e-6)
        assert tracks.column("is_preferred").to_pylist() == expected.column("is_preferred").to_pylist()
        counts.append(tracks.num_rows)
    assert counts[0] < counts[1]


def test_screening_over_spark(session, catalogue):
    elements = Elements.from_arrow(catalogue.to_arrow())
    span = Span.whole(START, START + 60 * MINUTE)
    screening = Screening.of_all(elements, 50.0)
    found = close_approaches(session, screening, in_parts(span, Pairs.ALL, 3)).toArrow()
    expected = pa.Table.from_batches([as_batch(screen(elements, span, threshold_km=50.0), elements)])
    assert expected.num_rows > 0
    assert found.sort_by(BY) == expected.sort_by(BY)


@pytest.mark.parametrize(("changed", "zone"), [(0, "UTC"), (3, "Europe/Berlin")])
def test_the_list_over_spark_continues_the_earlier_one_as_the_function_does(
    session, catalogue, changed, zone
):
    before = Elements.from_arrow(catalogue.sort("sat_no").to_arrow())
    values = before.values.copy()
    values[:changed, ELEMENT_FIELDS.index("mean_anomaly")] += 20.0
    now = replace(before, values=values)

    def builder(elements: Elements, span: Span, rescreening: Rescreening | None) -> ListBuilder:
        return ListBuilder(elements, span, 50.0, 14.0, rescreening, None, ObjectRadii(5.0))

    def all_pairs(elements: Elements, span: Span) -> pl.DataFrame:
        found = pl.DataFrame(pl.from_arrow(as_batch(screen(elements, span, threshold_km=50.0), elements)))
        return builder(elements, span, None).build(found, no_rows)

    no_rows = pl.DataFrame(pl.from_arrow(LIST_INPUT_SCHEMA.empty_table()))
    first = Span.whole(START, START + 60 * MINUTE)
    span = Span.whole(START + 20 * MINUTE, START + 60 * MINUTE)
    earlier = all_pairs(before, first)
    planned = plan(
        now,
        span,
        50.0,
        earlier=EarlierLimits(first.start, first.end, 50.0),
        changed=before.sat_no[:changed],
        parts=3,
    )
    assert planned.rescreening is not None
    frame = session.createDataFrame(
        earlier.select([*ENCOUNTER_SCHEMA.names, "event_id", "first_reported"]).to_arrow()
    )
    previous_zone = session.conf.get("spark.sql.session.timeZone")
    session.conf.set("spark.sql.session.timeZone", zone)
    try:
        rows = list_conjunctions(session, planned, frame, builder(now, span, planned.rescreening)).toArrow()
    finally:
        session.conf.set("spark.sql.session.timeZone", previous_zone)
    listed = pl.DataFrame(pl.from_arrow(rows.cast(CONJUNCTION_SCHEMA))).sort("tca", "event_id")
    expected = all_pairs(now, span)
    of_earlier = ["event_id", "first_reported", "previous_miss_distance_km"]
    order = ["sat1_object_designator", "sat2_object_designator", "tca"]
    assert listed.drop(of_earlier).sort(order).equals(expected.drop(of_earlier).sort(order))
    stayed = listed.join(earlier, on=[*order, "kind"], how="semi")
    assert stayed.height > 0
    assert stayed.select(*order, "event_id").equals(
        stayed.select(order).join(
            earlier.select(*order, "event_id"), on=order, how="left", maintain_order="left"
        )
    )
    assert stayed["miss_distance_km"].equals(stayed["previous_miss_distance_km"], check_names=False)


def test_ephemeris_files_are_read_and_screened_by_workers(session):
    frame = simulated_elements(seed=4, objects=400, epoch=NOON).sort("sat_no")
    elements = Elements.from_arrow(frame.to_arrow())
    files = [(f"{row}.oem", message(segment(elements, row))) for row in (2, 0, 1)]
    cut = files[0][1].decode().splitlines(keepends=True)
    cut[20] = cut[20][:40] + "\n"
    files.append(("cut.oem", "".join(cut).encode()))
    how: dict[str, Any] = {
        "threshold_km": 60.0,
        "max_element_age_days": 14.0,
        "exclude": [int(elements.sat_no[9])],
    }
    warnings: list[str] = []
    # The four files are two batches.
    size = max(len(zlib.compress(content, 1)) for _, content in files)
    screened = screen_files(
        session, iter(files), FileScreening(frame, **how), warnings.append, max_batch_bytes=2 * size
    )
    rows = pl.DataFrame(pl.from_arrow(screened.rows.toArrow()))
    reads = {name: read_oem(content, name) for name, content in files}
    expected = pl.concat(screened_file(name, read, frame, **how) for name, read in reads.items())
    assert rows.sort(pl.all()).equals(expected.sort(pl.all()))
    assert screened.approaches == expected.height > 3
    assert screened.files == len(files)
    assert screened.unusable_records == reads["cut.oem"].rejected.height == len(warnings) == 2


def test_the_first_unreadable_ephemeris_file_is_the_error(session):
    frame = simulated_elements(seed=4, objects=400, epoch=NOON).sort("sat_no")
    whole = message(segment(Elements.from_arrow(frame.to_arrow()), 0))
    files = [("c.oem", whole), ("b.oem", b""), ("d.oem", b"no message")]
    screening = FileScreening(frame, 60.0, 14.0, [])
    with raising(UnreadableMessage, reason="empty", subject="b.oem"):
        screen_files(session, files, screening, lambda _: None, max_batch_bytes=1)
