"""Close approaches as a table for people."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import polars as pl
from rich.console import Console
from rich.table import Table
from rich.text import Text

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


def show(found: pl.DataFrame, most: int) -> None:
    """At most `most` rows (0: all); the objects with their names."""
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
        return Text(f"{value} {row[name.replace('object_designator', 'name')] or ''}".rstrip())
    if name == "kind" and row.get("together_min"):
        return Text(f"{value} {row['together_min']} min")
    if isinstance(value, datetime):
        return Text(f"{value:%Y-%m-%d %H:%M:%S}")
    if name == "collision_probability":
        return Text(f"{value:.1e}{' diluted' if row.get('probability_diluted') else ''}")
    if isinstance(value, float):
        return Text(f"{value:.1f}" if name.endswith("days") else f"{value:.3f}")
    return Text(str(value))
