"""Raw tables of sensor measurements, one for each kind of sensor.

Ingestions fill them. Each record is written once, and records that cannot be decoded become dead letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from typing import Any, Literal

import dagster as dg
import pyarrow as pa

from branchlake_dagster import Decoded, Ingest, IngestTable, ingest_definitions
from branchlake_dagster.sda.assets.upkeep import live_freshness
from branchlake_dagster.sda.partitions import FIRST_WINDOW
from branchlake_dagster.sda.sensor_kinds.declaration import RECORD_ATTRIBUTES, SensorKind
from branchlake_dagster.sda.sensor_kinds.registered import DEFAULT_SENSOR_KINDS

Where = Literal["kafka", "landing"]
_FIRST_DAY = date.fromisoformat(FIRST_WINDOW[:10])
MAX_WAIT_S = 10.0
"""The longest time that a measurement waits for a batch, in seconds."""
QUIET_S = 3.0
"""The time without a further measurement after which the waiting ones are ingested, in seconds."""


def live_sensors(
    source: Where,
    receivers: Sequence[str] = (),
    kinds: Sequence[SensorKind] = DEFAULT_SENSOR_KINDS,
    *,
    keep_value: bool = False,
) -> dg.Definitions:
    """Build the ingestions of sensor kinds, from topics on Kafka or in the landing folder.

    `receivers` are the URLs of the receivers' monitors. The Dagster sensors that launch ingestion runs start
    as running.
    """
    ingests = raw_ingests(source, kinds, keep_value=keep_value)
    return ingest_definitions(
        *ingests, receivers=receivers, most_age_s=MAX_WAIT_S, quiet_s=QUIET_S, running=True
    )


def raw_ingests(
    source: Where, kinds: Sequence[SensorKind] = DEFAULT_SENSOR_KINDS, *, keep_value: bool = False
) -> list[Ingest]:
    """Return the declarations of the ingestions, one per kind of sensor, which reads the kind's topic.

    With `keep_value`, the tables keep the bytes of all measurements, so that a corrected decoder can read
    them again. It is off by default because of its cost (docs/benchmarks.md).
    """
    return [replace(_ingest(kind, source), keep_value=keep_value) for kind in kinds]


def _ingest(kind: SensorKind, source: Where) -> Ingest:
    decode = kind.decode

    def structs(values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        rows, reasons = decode(values)
        return rows.to_struct_array(), reasons

    contract, columns = kind.contract, kind.raw_columns
    attributes: dict[str, Any] = {
        name: attribute for name, attribute in RECORD_ATTRIBUTES.items() if name in columns
    }
    raw = IngestTable(
        key=kind.raw_table,
        columns={name: column_type for name, column_type in columns.items() if name not in attributes},
        attributes=attributes,
        contract=contract,
        layout=["day(sensor_timestamp)"],
        description=" ".join((contract.__doc__ or "").split())
        + " As it was received, one row for each record.",
        freshness_policy=live_freshness(kind.allowed_lateness_s),
        days_from=_FIRST_DAY,
    )
    return Ingest(
        name=kind.name,
        topics=[kind.topic],
        tables=[raw],
        format=Decoded(structs, kind.decoded_columns()),
        source=source,
    )
