"""Select, compare and print close approaches for `branchlake sda conjunctions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import polars as pl
from rich.console import Console
from rich.table import Table
from rich.text import Text

from branchlake_dagster.query.connection import LakeReader
from branchlake_dagster.sda.commands.published_tables import load_published_table
from branchlake_dagster.wording import format_printable

TABLE = "sda.conjunctions"
_SHOWN = (
    *("event_id", "kind", "tca", "miss_distance_km", "relative_speed_km_s"),
    *("sat1_object_designator", "sat1_name", "sat2_object_designator", "sat2_name"),
    *("collision_probability", "max_collision_probability", "probability_diluted", "together_min"),
    *(f"relative_position_{axis}_km" for axis in "rtn"),
    *("sat1_element_age_days", "sat2_element_age_days", "previous_miss_distance_km", "first_reported"),
)
_CHANGE_COLUMNS = (
    *("change", "event_id", "kind", "tca", "miss_distance_km", "was_tca", "was_miss_distance_km"),
    *("sat1_object_designator", "sat1_name", "sat2_object_designator", "sat2_name"),
)


@dataclass(frozen=True)
class ConjunctionFilter:
    """The selection of close approaches. Empty fields select all.

    A close approach matches `objects` if one of its two objects is among them. `since` and `until` limit its
    time, without `until` itself; `within_km` is the largest miss distance.
    """

    objects: tuple[int, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    within_km: float | None = None
    kinds: tuple[str, ...] = ()

    def condition(self) -> str:
        """Return the selection as a condition in DuckDB's SQL.

        It contains only numbers, times and known kinds.
        """
        numbers = ", ".join(str(int(one)) for one in self.objects)
        pair = f"(sat1_object_designator IN ({numbers}) OR sat2_object_designator IN ({numbers}))"
        kinds = ", ".join(f"'{kind}'" for kind in self.kinds)
        parts = (
            pair if self.objects else "",
            f"tca >= TIMESTAMPTZ '{self.since.isoformat()}'" if self.since else "",
            f"tca < TIMESTAMPTZ '{self.until.isoformat()}'" if self.until else "",
            f"miss_distance_km <= {float(self.within_km)}" if self.within_km is not None else "",
            f"kind IN ({kinds})" if self.kinds else "",
        )
        return " AND ".join(part for part in parts if part) or "TRUE"

    def select_changes(self, changes: pl.DataFrame) -> pl.DataFrame:
        """Return the rows of `compare_conjunctions` that are selected by their later or their earlier values.

        The kind is that of the later list, or of the earlier one if the approach is no longer listed.
        Objects are not compared: the lists were read for them already.
        """
        moments = (pl.col("tca"), pl.col("was_tca"))
        misses = (pl.col("miss_distance_km"), pl.col("was_miss_distance_km"))
        wanted = [
            pl.any_horizontal(*(one >= self.since for one in moments)) if self.since else None,
            pl.any_horizontal(*(one < self.until for one in moments)) if self.until else None,
            pl.col("kind").is_in(self.kinds) if self.kinds else None,
        ]
        if self.within_km is not None:
            wanted.append(pl.any_horizontal(*(one <= self.within_km for one in misses)))
        return changes.filter(*(one for one in wanted if one is not None))


def find_missing_list(reader: LakeReader, at: str | None) -> str | None:
    """Return the label of the state at `at` if the table does not exist in it yet, else None.

    `at` is a time or a commit hash; None means the present state.
    """
    state = reader.find_state(at=at)
    return state.label if load_published_table(reader, TABLE, state) is None else None


def listed_columns(*, changes: bool) -> Sequence[str]:
    """Return the columns of `read_conjunctions`, or with `changes` those of `compare_conjunctions`."""
    return _CHANGE_COLUMNS if changes else _SHOWN


def read_conjunctions(
    reader: LakeReader, wanted: ConjunctionFilter, *, at: str | None
) -> tuple[pl.DataFrame, str]:
    """Read the selected close approaches with the objects' names, nearest first.

    Args:
        reader: Reads the lake.
        wanted: The selection.
        at: A time or a commit hash of the state to read; None reads the present state.

    Returns:
        The rows, and a text with the state that was read, and the time span and threshold of the screening.
    """
    query = f"""
        SELECT c.*, a.object_name AS sat1_name, b.object_name AS sat2_name
        FROM {TABLE} AS c LEFT JOIN sda.catalogue AS a ON a.sat_no = c.sat1_object_designator
        LEFT JOIN sda.catalogue AS b ON b.sat_no = c.sat2_object_designator
        WHERE {wanted.condition()} ORDER BY c.miss_distance_km, c.tca, c.event_id
    """  # noqa: S608 - see `condition`
    with reader.sql(query, at=at) as result:
        found, place = result.polars(), result.state
    # A list from before a column existed is shown without it.
    found = found.select(name for name in _SHOWN if name in found.columns)
    reach = f"SELECT min(screened_from), max(screened_until), max(threshold_km) FROM {TABLE}"  # noqa: S608
    with reader.sql(reach, branch=place.ref) as result:
        ((begin, end, threshold_km),) = result.polars().rows()
    if begin is None:
        return found, f"{place.label}; nothing was found to come close"
    time = f"{begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC"
    return found, f"{place.label}; screened {time}, {threshold_km:g} km"


def compare_conjunctions(before: pl.DataFrame, after: pl.DataFrame) -> pl.DataFrame:
    """Return the differences between two lists of close approaches.

    `change` is `new` for an event that only the later list has, `gone` for one that only the earlier list
    has, and `moved` for one whose time, distance or kind differs. `was_tca` and `was_miss_distance_km` are
    the values of the earlier list. An event before the start of the later list is `gone`, because the later
    screening does not cover its time.
    """
    earlier = before.select(
        "event_id",
        was_kind="kind",
        was_tca="tca",
        was_miss_distance_km="miss_distance_km",
        was_sat1="sat1_object_designator",
        was_sat2="sat2_object_designator",
    )
    both = after.join(earlier, on="event_id", how="full", coalesce=True)
    change = (
        pl.when(pl.col("was_tca").is_null())
        .then(pl.lit("new"))
        .when(pl.col("tca").is_null())
        .then(pl.lit("gone"))
        .when(
            (pl.col("tca") != pl.col("was_tca"))
            | (pl.col("miss_distance_km") != pl.col("was_miss_distance_km"))
            | (pl.col("kind") != pl.col("was_kind"))
        )
        .then(pl.lit("moved"))
    )
    return (
        both.with_columns(
            change.alias("change"),
            pl.coalesce("sat1_object_designator", "was_sat1").alias("sat1_object_designator"),
            pl.coalesce("sat2_object_designator", "was_sat2").alias("sat2_object_designator"),
        )
        .filter(pl.col("change").is_not_null())
        .with_columns(pl.coalesce("kind", "was_kind").alias("kind"))
        .select(_CHANGE_COLUMNS)
        .sort(pl.coalesce("miss_distance_km", "was_miss_distance_km"), "event_id")
    )


_LEFT_OUT = (
    *("event_id", "sat1_name", "sat2_name", "together_min", "first_reported"),
    *("max_collision_probability", "probability_diluted"),
)
_HEADS = {
    "miss_distance_km": "miss, km",
    "was_miss_distance_km": "was, km",
    "was_tca": "was at",
    "relative_speed_km_s": "km/s",
    "collision_probability": "probability",
    "previous_miss_distance_km": "before, km",
    "relative_position_r_km": "R, km",
    "relative_position_t_km": "T, km",
    "relative_position_n_km": "N, km",
    "sat1_element_age_days": "age 1, d",
    "sat2_element_age_days": "age 2, d",
    "sat1_object_designator": "object 1",
    "sat2_object_designator": "object 2",
}


def print_conjunctions(found: pl.DataFrame, most: int) -> None:
    """Print at most `most` rows as a table, with the objects' names; 0 prints all."""
    columns = [name for name in found.columns if name not in _LEFT_OUT]
    table = Table(show_edge=False, pad_edge=False)
    for name in columns:
        number = found.schema[name].is_numeric() and not name.endswith("designator")
        table.add_column(_HEADS.get(name, name), justify="right" if number else "left", no_wrap=number)
    for row in found.head(most or found.height).iter_rows(named=True):
        table.add_row(*(_cell(name, row) for name in columns))
    console = Console()
    console.print(table) if console.is_terminal else Console(width=10_000).print(table)


def _cell(name: str, row: dict[str, Any]) -> Text:
    value = row[name]
    if value is None:
        return Text("")
    if name.endswith("designator"):
        object_name = row[name.replace("object_designator", "name")] or ""
        return Text(format_printable(f"{value} {object_name}".rstrip()))
    if name == "kind" and row.get("together_min"):
        return Text(f"{value} {row['together_min']} min")
    if isinstance(value, datetime):
        return Text(f"{value:%Y-%m-%d %H:%M:%S}")
    if name == "collision_probability":
        return Text(f"{value:.1e}{' diluted' if row.get('probability_diluted') else ''}")
    if isinstance(value, float):
        return Text(f"{value:.1f}" if name.endswith("days") else f"{value:.3f}")
    return Text(format_printable(str(value)))
