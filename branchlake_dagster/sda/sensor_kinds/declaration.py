"""The declaration of a kind of sensor: its messages, its raw table and its measured values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import dagster as dg
import pyarrow as pa

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.sda.contracts.fields import Contract
from branchlake_dagster.sda.contracts.raw import Received
from branchlake_dagster.sda.sensors.models import (
    MEASUREMENT_COLUMNS,
    STATION_COLUMNS,
    MeasurementModel,
    measurement_model,
)

DecodeBytes = Callable[[pa.BinaryArray], tuple[pa.RecordBatch, pa.StringArray]]
"""A function that decodes values.

It returns a row for each value, and for each row null, or the reason why it is not a measurement.
"""

RECORD_ATTRIBUTES: Mapping[str, str] = {
    "received_at": "timestamp",
    "topic_partition": "partition",
    "topic_offset": "offset",
    "frame_digest": "digest",
}
"""Columns of raw tables that come from the record (time, partition, offset, digest).

`decode` does not return them.
"""

ON_GROUND: Mapping[str, str] = {name: name for name in STATION_COLUMNS}
"""Maps the envelope's columns of a ground sensor's coordinates to the columns of `OnGround`."""

CLOCK_ERROR_S: Mapping[str, str] = {
    "gps": "1e-6D",
    "ntp": "0.010D + 0.001D * floor({age} / 60)",
    "onboard": "1e-4D * {age}",
}
"""The largest error of a clock by its quality, in seconds, as SQL. For any other quality it is 5 s."""

_NAME = re.compile("[a-z][a-z0-9_]{0,31}")


_TAKEN_KINDS = ("edited", "measurements")
"""Names that cannot be a `source_kind`.

`fused_tracks` counts a kind's observations in ``n_<source_kind>``, and has other columns of this form.
"""


@dataclass(frozen=True, kw_only=True)
class SensorKind:
    """A kind of sensor. The raw table, its ingestion and all later tables are derived from this declaration.

    Args:
        source_kind: The value of the column `source_kind`. It is part of the ids of observations, so it must
            never change. The topic is `sda.<source_kind>`.
        name: The name of the ingestion. The raw table is `sda.raw_<name>`.
        decode: Decodes the bytes of whole batches, on Spark's workers. It returns a row for each value, and
            for each row null, or the reason why it is not a measurement (a dead letter). Workers import its
            module.
        contract: The columns of the raw table, in their order: a subclass of `Received`, or `OnGround`.
        record_id: The columns of the raw table that identify a record of one sensor.
        measures: The measured columns of the envelope, such as `("range_km",)`; see
            `sensors.models.GEOMETRIES`. The envelope is the set of columns that observations of all kinds
            have.
        envelope: Columns of the envelope as Spark SQL over the raw table: the measured columns, their
            uncertainties (one standard deviation), and `ON_GROUND` for sensors on the ground.
        claim: The catalog number of the object that the sensor claims to observe, as SQL. (default: none)
        clock_quality: The source of the sensor clock's time, as SQL: `gps`, `ntp`, `onboard` or anything
            else.
        clock_age_s: Seconds since the clock was last set, as SQL.
        allowed_lateness_s: The usual time from measurement to receipt. Later measurements are used too. The
            raw table counts as late after twice that time.
        decoded_schema: The columns that `decode` returns. (default: those of the contract, in its order,
            without `RECORD_ATTRIBUTES`)

    Raises:
        ConfigurationError: The parts of the declaration contradict each other.
    """

    source_kind: str
    name: str
    decode: DecodeBytes
    contract: type[Contract]
    measures: tuple[str, ...]
    envelope: Mapping[str, str]
    record_id: tuple[str, ...] = ("frame_digest",)
    claim: str = "CAST(NULL AS BIGINT)"
    clock_quality: str = "clock_source"
    clock_age_s: str = "clock_sync_age_s"
    allowed_lateness_s: float
    decoded_schema: pa.Schema | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for text in (self.source_kind, self.name):
            if not _NAME.fullmatch(text):
                raise ConfigurationError(
                    f"{text!r} cannot name a kind of sensor.",
                    hint="Use a lower-case letter, then at most 31 letters, digits and underscores.",
                )
        if self.source_kind in _TAKEN_KINDS:
            raise self._wrong("a column of fused_tracks has this name", "Choose another source_kind.")
        if not issubclass(self.contract, Received):
            raise self._wrong(
                "its contract is not a subclass of Received", "Derive it from Received or OnGround."
            )
        columns = self.raw_columns
        if unknown := [name for name in self.record_id if name not in columns]:
            raise self._wrong(
                f"its contract has no column {unknown[0]}", "Correct record_id, or add the column."
            )
        if not self.record_id:
            raise self._wrong("record_id is empty", 'Name the columns of a record, or "frame_digest".')
        if not self.allowed_lateness_s > 0:
            raise self._wrong("allowed_lateness_s is not positive", "Give seconds.")
        model = self.model
        needed = {name for one in model.quantities for name in (one.column, one.uncertainty)}
        if model.is_on_ground:
            needed |= set(STATION_COLUMNS)
        if needed != set(self.envelope):
            missing, superfluous = sorted(needed - set(self.envelope)), sorted(set(self.envelope) - needed)
            raise self._wrong(
                f"envelope lacks {missing} and has {superfluous} beside what is measured",
                "Map the measured columns, their uncertainties, and the place of a sensor on the ground.",
            )

    def _wrong(self, problem: str, hint: str) -> ConfigurationError:
        return ConfigurationError(
            f"The kind of sensor {self.source_kind} is declared wrongly: {problem}.", hint=hint
        )

    @cached_property
    def model(self) -> MeasurementModel:
        """The measurement model, which predicts the measured values from an object's state."""
        return measurement_model(self.measures)

    @cached_property
    def raw_columns(self) -> dict[str, str]:
        """The Spark types of the raw table's columns."""
        return _spark_types(self.contract)

    @property
    def topic(self) -> str:
        """The topic of the sensor's records."""
        return f"sda.{self.source_kind}"

    @property
    def raw_table(self) -> dg.AssetKey:
        """The asset of the raw table."""
        return dg.AssetKey(["sda", f"raw_{self.name}"])

    @property
    def envelope_columns(self) -> list[str]:
        """All measurement columns of the envelope as SQL. Columns that the kind does not measure are null."""
        return [
            f"CAST({self.envelope.get(name, 'NULL')} AS DOUBLE) AS {name}" for name in MEASUREMENT_COLUMNS
        ]

    @property
    def max_skew_s(self) -> str:
        """The largest error of the clock in seconds, as SQL.

        A clock of unknown quality has the largest value.
        """
        cases = " ".join(
            f"WHEN '{quality}' THEN {error.format(age=f'({self.clock_age_s})')}"
            for quality, error in CLOCK_ERROR_S.items()
        )
        return f"CASE {self.clock_quality} {cases} ELSE 5.0D END"

    @property
    def record_name(self) -> str:
        """SQL of a text that identifies a record of one sensor. It is null if a part is null."""
        return "concat(" + ", '|', ".join(self.record_id) + ")"

    def decoded_columns(self) -> pa.Schema:
        """Return the Arrow schema of the rows that `decode` returns."""
        return self.decoded_schema if self.decoded_schema is not None else decoded_columns(self.contract)


def decoded_columns(contract: type[Contract]) -> pa.Schema:
    """Return the columns of a raw table that `decode` returns, in order: all but `RECORD_ATTRIBUTES`."""
    types = _spark_types(contract)
    return pa.schema([(name, _ARROW_TYPES[types[name]]) for name in types if name not in RECORD_ATTRIBUTES])


def _spark_types(contract: type[Contract]) -> dict[str, str]:
    columns = contract.to_schema().columns
    return {name: column.dtype.type.simpleString() for name, column in columns.items()}


_ARROW_TYPES = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", "UTC"),
}
