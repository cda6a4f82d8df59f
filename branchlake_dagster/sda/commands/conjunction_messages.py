"""Write published close approaches as Conjunction Data Messages (CCSDS 508.0-B), one file per message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import polars as pl

from branchlake_dagster.query.connection import LakeReader
from branchlake_dagster.sda.commands.conjunction_list import TABLE, ConjunctionFilter
from branchlake_dagster.sda.messages.cdm import check_kind, format_cdm, message_id
from branchlake_dagster.sda.messages.errors import NotAMessage
from branchlake_dagster.sda.messages.notation import Notation
from branchlake_dagster.sda.messages.parties import parties_of
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS

_TEXTS = ("object_name", "object_id", "source", "data_mode")
_AT_ONCE = 5_000
_SHOWN = 5


@dataclass(frozen=True)
class Written:
    """The number of written messages, the reasons of the refused ones, and a label of the lake's state."""

    count: int
    refused: list[str]
    place: str

    def format_refusals(self) -> str:
        """Return the first reasons, one per line, and the number of further ones."""
        more = len(self.refused) - _SHOWN
        return "\n".join(self.refused[:_SHOWN] + ([f"… and {more} more."] if more > 0 else []))


def write_messages(
    reader: LakeReader,
    wanted: ConjunctionFilter,
    folder: Path,
    *,
    at: str | None,
    notation: Notation,
    originator: str,
    now: Callable[[], datetime],
) -> Written:
    """Write one file per close approach, named by its message's id. An existing file is replaced.

    Each file is written atomically. A row that cannot become a message is reported in `refused`, and the
    others are written.

    Args:
        reader: Reads the lake.
        wanted: The selection of close approaches.
        folder: The folder of the files. It is created if it does not exist.
        at: A time or a commit hash of the state to read; None reads the present state.
        notation: KVN (key-value lines) or XML.
        originator: The value of ORIGINATOR.
        now: Returns the creation time of the messages.
    """
    query = f"SELECT * FROM {TABLE} WHERE {wanted.condition()} ORDER BY miss_distance_km, tca, event_id"  # noqa: S608 - see `condition`
    with reader.sql(query, at=at) as result:
        found, place = result.polars(), result.state
    folder.mkdir(parents=True, exist_ok=True)
    count, refused, created = 0, list[str](), now()
    for begin in range(0, found.height, _AT_ONCE):
        few = found[begin : begin + _AT_ONCE]
        sets, kinds = _read_element_sets(reader, few, place.ref), _read_object_types(reader, few, place.ref)
        parties = parties_of(few, sets, kinds)
        for row, both in zip(few.iter_rows(named=True), parties, strict=True):
            try:
                check_kind(row)
                if isinstance(both, NotAMessage):
                    raise both
                message = format_cdm(row, both, originator=originator, created=created, notation=notation)
            except NotAMessage as error:
                refused.append(str(error))
                continue
            _write(folder / f"{message_id(row)}.cdm.{notation.value}", message)
            count += 1
    return Written(count, refused, place.label)


def _write(path: Path, message: str) -> None:
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(message, encoding="ascii")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_element_sets(reader: LakeReader, found: pl.DataFrame, ref: str) -> pl.DataFrame:
    """Read the element sets of the close approaches' objects and epochs, from the catalog and its history."""
    columns = ("sat_no", "epoch", *ELEMENT_FIELDS)
    numbers = _format_numbers(found)
    epochs = pl.concat([found[f"sat{k}_element_epoch"].alias("epoch") for k in (1, 2)]).unique()
    parts = [_read(reader, "sda.catalogue", (*columns, *_TEXTS), f"sat_no IN ({numbers})", ref)]
    if "sda.element_history" in reader.tables(branch=ref):
        ordered = epochs.sort().to_list()
        first, last = ordered[0].isoformat(), ordered[-1].isoformat()
        of_epochs = f"epoch BETWEEN TIMESTAMPTZ '{first}' AND TIMESTAMPTZ '{last}'"
        parts.append(
            _read(
                reader,
                "sda.element_history",
                (*columns, *_TEXTS),
                f"sat_no IN ({numbers}) AND {of_epochs}",
                ref,
            )
        )
    sets = pl.concat(parts, how="diagonal_relaxed").with_columns(pl.col("epoch").cast(epochs.dtype))
    return sets.filter(pl.col("epoch").is_in(epochs.implode())).unique(
        columns, keep="first", maintain_order=True
    )


def _read_object_types(reader: LakeReader, found: pl.DataFrame, ref: str) -> dict[int, str | None]:
    """Read the type of each object (payload, rocket body, …) from the satellite catalog."""
    if "sda.satellites" not in reader.tables(branch=ref):
        return {}
    chosen = f"sat_no IN ({_format_numbers(found)}) AND valid_to IS NULL"
    return dict(_read(reader, "sda.satellites", ("sat_no", "object_type"), chosen, ref).iter_rows())


def _format_numbers(found: pl.DataFrame) -> str:
    pair = pl.concat([found[f"sat{k}_object_designator"].alias("sat_no") for k in (1, 2)]).unique().to_list()
    return ", ".join(str(int(one)) for one in pair)


def _read(reader: LakeReader, table: str, columns: tuple[str, ...], chosen: str, ref: str) -> pl.DataFrame:
    """Read those of the columns that the table has, from the rows of the condition `chosen`."""
    there = {field.name for field in reader.table(table, branch=ref).schema().fields}
    wanted = ", ".join(name for name in columns if name in there)
    with reader.sql(f"SELECT {wanted} FROM {table} WHERE {chosen}", branch=ref) as result:  # noqa: S608 - numbers and times of ours
        return result.polars()
