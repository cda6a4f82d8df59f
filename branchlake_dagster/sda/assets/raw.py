"""Raw tables of sensor measurements, one for each kind of sensor.

Ingestions fill them: each record is written once, and records that cannot be decoded become dead letters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import dagster as dg
import pyarrow as pa

from branchlake_dagster import Decoded, Ingest, IngestTable, ingest_definitions
from branchlake_dagster.sda.assets.upkeep import OF_LIVE
from branchlake_dagster.sda.contracts import RawLink, RawOptical, RawRadar
from branchlake_dagster.sda.contracts.fields import Contract
from branchlake_dagster.sda.wire.columns import DECODED
from branchlake_dagster.sda.wire.links import decode_links
from branchlake_dagster.sda.wire.optical import decode_optical
from branchlake_dagster.sda.wire.radar import decode_radar

Where = Literal["kafka", "landing"]
RAW_RADAR = dg.AssetKey(["sda", "raw_radar"])
RAW_OPTICAL = dg.AssetKey(["sda", "raw_optical"])
RAW_LINKS = dg.AssetKey(["sda", "raw_links"])
MAX_WAIT_S = 10.0
"""The longest time that a measurement waits for a batch, in seconds."""
_OF_THE_RECORD: Mapping[str, Any] = {
    "received_at": "timestamp",
    "topic_partition": "partition",
    "topic_offset": "offset",
    "frame_digest": "digest",
}


def live_sensors(source: Where, receivers: Sequence[str] = ()) -> dg.Definitions:
    """The ingestions of radars, telescopes and links, from topics on Kafka or in the landing folder.

    `receivers` are the URLs of the receivers' monitors. The sensors for single batches are on at first.
    """
    return ingest_definitions(*raw_ingests(source), receivers=receivers, most_age_s=MAX_WAIT_S, running=True)


def raw_ingests(source: Where) -> list[Ingest]:
    """Return the declarations of the ingestions, for the topics of `branchlake sda receive`."""
    return [
        _ingest("radar", "sda.radar", decode_radar, RawRadar, RAW_RADAR, source),
        _ingest("optical", "sda.optical", decode_optical, RawOptical, RAW_OPTICAL, source),
        _ingest("links", "sda.isl", decode_links, RawLink, RAW_LINKS, source),
    ]


def _ingest(
    name: str,
    topic: str,
    decode: Callable[[Any], tuple[pa.RecordBatch, pa.StringArray]],
    contract: type[Contract],
    table: dg.AssetKey,
    source: Where,
) -> Ingest:
    def structs(values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        rows, reasons = decode(values)
        return rows.to_struct_array(), reasons

    columns = contract.to_schema().columns
    attributes = {one: of for one, of in _OF_THE_RECORD.items() if one in columns}
    types = {one: column.dtype.type.simpleString() for one, column in columns.items()}
    raw = IngestTable(
        key=table,
        columns={one: kind for one, kind in types.items() if one not in attributes},
        attributes=attributes,
        contract=contract,
        layout=["day(sensor_timestamp)"],
        description=" ".join((contract.__doc__ or "").split())
        + " As it was received, one row for each record.",
        freshness_policy=OF_LIVE,
    )
    return Ingest(name=name, topics=[topic], tables=[raw], format=Decoded(structs, DECODED), source=source)
