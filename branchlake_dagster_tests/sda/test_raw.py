"""Bytes of live sensors become rows of the raw tables, and what cannot be decoded a dead letter."""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.ingest.raw_reprocessing import require_kept_records
from branchlake_dagster.ingest.raw_slice import position_columns
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.receivers.kafka_sink import KafkaSink
from branchlake_dagster.receivers.landing_sink import LandingSink
from branchlake_dagster.receivers.records import ReceiverOrigin, Record
from branchlake_dagster.sda.assets.observations import OBSERVATIONS
from branchlake_dagster.sda.assets.raw import Where, raw_ingests
from branchlake_dagster.sda.assets.upkeep import live_freshness
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH, simulated_elements
from branchlake_dagster.sda.graph.code_location import (
    DATA_MODE,
    GP_DIR,
    GP_PULL,
    KEEP_RECORDS,
    LIVE_SENSORS,
    build_definitions,
    data_mode,
)
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.sensors.simulate import simulate
from branchlake_dagster.sda.sources import GpSource, UnknownSnapshotError
from branchlake_dagster.sda.wire.columns import DECODED, WRONG_SIZE
from branchlake_dagster.sda.wire.links import decode_links, encode_links
from branchlake_dagster.sda.wire.optical import MALFORMED, decode_optical, encode_optical
from branchlake_dagster.sda.wire.radar import KEY_BYTES, decode_radar, encode_radar
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.ingest.driving import Driver
from branchlake_dagster_tests.ingest.test_landing_source import LandingDriver
from branchlake_dagster_tests.suite.kafka import Broker
from branchlake_dagster_tests.suite.raised import raising

RECEIVED_NS = 1_780_000_000_123_456_000
WIRE: dict[str, Any] = {
    "radar": ("radar", encode_radar, decode_radar, WRONG_SIZE),
    "optical": ("optical", encode_optical, decode_optical, MALFORMED),
    "links": ("isl", encode_links, decode_links, WRONG_SIZE),
}


@cache
def sent(name: str) -> list[bytes]:
    """Some bytes of a kind, as the pipeline's own simulation measures."""
    kind, encode, _, _ = WIRE[name]
    made = simulated_elements(seed=1, objects=400, epoch=REFERENCE_EPOCH)
    elements = Elements.from_arrow(made.to_arrow().sort_by("sat_no"))
    start = int(datetime(2026, 8, 8, tzinfo=UTC).timestamp() * 1e6)
    native = simulate(elements, kind=kind, start=start, end=start + 3_600_000_000, seed=1)
    found: list[bytes] = encode(native[:50]).to_pylist()
    assert len(found) == 50
    return found


def own(ingest: Ingest, topic: str | None = None) -> Ingest:
    """The ingestion with a name and tables of the test's own."""
    name = f"i{uuid.uuid4().hex[:8]}"
    (table,) = ingest.tables
    mine = replace(table, key=[name, table.asset.path[-1]])
    return replace(ingest, name=name, topics=[topic or ingest.topics[0]], tables=[mine])


def test_the_rows_of_every_raw_table_are_identified_by_their_records() -> None:
    """So kept measurements can be decoded again, once somebody keeps them."""
    for ingest in raw_ingests("landing", keep_value=True):
        (table,) = ingest.tables
        require_kept_records(ingest)
        columns = position_columns(table.asset.to_user_string(), ingest, table.attributes)
        assert columns == {"partition": "topic_partition", "offset": "topic_offset"}
    assert not any(one.keep_value for one in raw_ingests("landing"))


def records(name: str) -> list[Record]:
    return [Record(value, b"k", RECEIVED_NS, b"h:1") for value in [*sent(name), b"damaged"]]


def holds(driver: Driver, name: str) -> None:
    """Each measurement is there once, with what its bytes say, and the damaged one is a dead letter."""
    import pyarrow as pa

    decoded, _ = WIRE[name][2](pa.array(sent(name)))
    found = pl.DataFrame(pl.from_arrow(driver.arrow())).sort("topic_offset")
    shared = [column for column in DECODED.names if column in found.columns]
    wanted = pl.DataFrame(pl.from_arrow(pa.Table.from_batches([decoded]))).select(shared)
    assert found.select(shared).equals(wanted)
    # What the table has no column for, no record of the kind fills, but for the kind itself.
    left = [column for column in DECODED.names if column not in shared and column != "source_kind"]
    assert all(decoded[column].null_count == len(decoded) for column in left)
    received = datetime.fromtimestamp(RECEIVED_NS // 1_000_000 / 1_000, UTC)
    assert {at.replace(microsecond=at.microsecond // 1_000 * 1_000) for at in found["received_at"]} == {
        received
    }
    assert found["topic_offset"].to_list() == list(range(50))
    if "frame_digest" in found.columns:
        assert set(found["frame_digest"]) == {hashlib.sha256(value).hexdigest() for value in sent(name)}
    (dead,) = driver.dead()
    assert (dead["value"], dead["error"]) == (b"damaged", WIRE[name][3])


def test_the_three_kinds_are_read_from_a_landing_folder(
    lakehouse: Lakehouse, spark_session: Any, tmp_path: Path
) -> None:
    for ingest in raw_ingests("landing"):
        (topic,) = ingest.topics
        sink = LandingSink(tmp_path, topic, 0, ReceiverOrigin("r1", "udp"))
        sink.open(resume=False)
        sink.write(records(ingest.name)[:20])
        sink.write(records(ingest.name)[20:])
        sink.close()
        driver = LandingDriver(lakehouse, tmp_path, own(ingest), spark_session)
        assert driver.batch().record_count == 51
        holds(driver, ingest.name)


def test_datagrams_of_radars_go_through_a_broker(
    lakehouse: Lakehouse, spark_session: Any, kafka: Broker
) -> None:
    topic = kafka.topic()
    start, end = KEY_BYTES
    sink = KafkaSink(topic, None, ReceiverOrigin("r1", "udp"), kafka.cluster.client_options())
    sink.open(resume=False)
    sink.write([one._replace(key=one.value[start:end]) for one in records("radar")])
    sink.close()
    driver = Driver(lakehouse, kafka, spark_session, own(raw_ingests("kafka")[0], topic))
    (place,) = driver.look().topics[topic].partitions()
    at = driver.topics.earliest_time({place: 0})
    assert at is not None
    assert int(at.timestamp() * 1_000) == RECEIVED_NS // 1_000_000
    assert driver.batch().record_count == 51
    holds(driver, "radar")


# -- definitions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["landing", "kafka"])
def test_every_column_is_described_and_is_one_of_the_wire_or_of_the_record(where: Where) -> None:
    for ingest in raw_ingests(where):
        (table,) = ingest.tables
        assert table.contract is not None
        columns = table.contract.to_schema().columns
        assert set(columns) == {*table.columns, *table.attributes}
        assert set(table.columns) <= set(DECODED.names)
        assert all(column.description for column in columns.values())


@pytest.mark.parametrize("where", ["landing", "kafka"])
def test_raw_tables_are_filled_from_the_landing_folder_or_from_kafka_batch_by_batch(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if where == "kafka":
        monkeypatch.setenv(LIVE_SENSORS, where)
    repository = build_definitions(Settings(state_dir=tmp_path)).get_repository_def()
    keys = set(repository.asset_graph.get_all_asset_keys())
    raw = {dg.AssetKey(["sda", f"raw_{name}"]) for name in ("radar", "optical", "links")}
    topics = {dg.AssetKey([where, f"sda.{kind}"]) for kind in ("radar", "optical", "isl")}
    dead = {dg.AssetKey(["sda", f"{name}_dead_letters"]) for name in ("radar", "optical", "links")}
    assert raw | topics | dead <= keys
    for key in raw:
        spec = repository.asset_graph.get(key)
        assert spec.freshness_policy is not None
        assert "dagster/column_schema" in spec.metadata
    of_ingestions = [one for one in repository.sensor_defs if one.name.startswith("ingest_")]
    assert len(of_ingestions) == 9
    for one in of_ingestions:
        is_live = one.name.endswith("_live_sensor")
        running, stopped = dg.DefaultSensorStatus.RUNNING, dg.DefaultSensorStatus.STOPPED
        assert one.default_status is (stopped if is_live else running)


def test_without_kafkas_client_landing_folders_work_and_kafka_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from branchlake_dagster import extras

    found = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "confluent_kafka" else found(name))
    monkeypatch.setenv(LIVE_SENSORS, "landing")
    build_definitions(Settings(state_dir=tmp_path))
    monkeypatch.setenv(LIVE_SENSORS, "kafka")
    with raising(extras.MissingExtra, "confluent_kafka"):
        build_definitions(Settings(state_dir=tmp_path))


def test_the_mode_of_the_measurements_is_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(DATA_MODE, raising=False)
    assert data_mode() == "REAL"
    monkeypatch.setenv(DATA_MODE, " simulated ")
    assert data_mode() == "SIMULATED"
    repository = build_definitions(Settings(state_dir=tmp_path)).get_repository_def()
    fields = repository.assets_defs_by_key[OBSERVATIONS].op.config_schema.config_type.fields
    assert fields["data_mode"].default_value == "SIMULATED"
    monkeypatch.setenv(DATA_MODE, "imagined")
    with raising(ConfigurationError, "'IMAGINED'"):
        build_definitions(Settings(state_dir=tmp_path))


def test_a_folder_of_gp_files_that_does_not_exist_is_not_simulated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The code location loads nevertheless: a file system that is not mounted stops no other asset."""

    def catalogue_dir() -> str | None:
        definitions = build_definitions(Settings(state_dir=tmp_path))
        gp = definitions.get_repository_def().get_top_level_resources()["gp"]
        return str(gp.config_schema.default_value["catalogue_dir"] or "")

    monkeypatch.delenv(GP_PULL, raising=False)
    monkeypatch.delenv(GP_DIR, raising=False)
    assert catalogue_dir() == ""
    folder = tmp_path / "gpp"
    monkeypatch.setenv(GP_DIR, str(folder))
    assert catalogue_dir() == str(folder)
    with raising(UnknownSnapshotError, GP_DIR, source=str(folder)):
        GpSource(catalogue_dir=str(folder)).files()
    (tmp_path / "gpp").write_text("a file")
    with raising(UnknownSnapshotError, GP_DIR, source=str(folder)):
        GpSource(catalogue_dir=str(folder)).read("active")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(GP_DIR, "~/new")
    monkeypatch.setenv(GP_PULL, "celestrak")
    assert catalogue_dir() == str(tmp_path / "new")
    assert (tmp_path / "new").is_dir()


def test_the_bytes_of_measurements_are_kept_where_the_environment_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = dg.AssetKey(["sda", "radar_kept_records"])
    for value, keeps in ((None, False), ("false", False), (" True", True)):
        monkeypatch.delenv(KEEP_RECORDS, raising=False)
        if value is not None:
            monkeypatch.setenv(KEEP_RECORDS, value)
        repository = build_definitions(Settings(state_dir=tmp_path)).get_repository_def()
        assert (kept in repository.assets_defs_by_key) is keeps
    monkeypatch.setenv(KEEP_RECORDS, "radar")
    with raising(ConfigurationError, "'radar'"):
        build_definitions(Settings(state_dir=tmp_path))


def test_another_place_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(LIVE_SENSORS, "pulsar")
    with raising(ConfigurationError, "'pulsar'"):
        build_definitions(Settings(state_dir=tmp_path))


@pytest.mark.parametrize(("lateness_s", "minutes"), [(0.1, 5), (30.0, 5), (600.0, 20), (86_400.0, 2_880)])
def test_a_raw_table_without_new_rows_warns_after_twice_the_lateness(lateness_s: float, minutes: int) -> None:
    window = timedelta(minutes=minutes)
    expected = dg.FreshnessPolicy.time_window(fail_window=3 * window, warn_window=window)
    assert live_freshness(lateness_s) == expected
