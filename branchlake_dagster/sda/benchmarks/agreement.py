"""`branchlake bench agreement`: compare the screening's events with those of a brute-force search.

Screening is the search for close approaches of all pairs of objects. An event is one close approach.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table

from branchlake_dagster.sda.benchmarks.brute_force import EVENT_SCHEMA, find_events, read_reference_catalog
from branchlake_dagster.sda.conjunctions.screening import MINUTE, Encounters, Kind, Span, screen
from branchlake_dagster.sda.gp.read import read_catalogue
from branchlake_dagster.sda.gp.simulated import simulated_elements
from branchlake_dagster.sda.gp.write import format_tle
from branchlake_dagster.sda.orbits.plausible import possible_states
from branchlake_dagster.sda.orbits.propagation import Elements, propagate_satellites

MATCH_WITHIN_S = 30.0
"""Two events of one pair and kind are the same event if their times differ by at most this."""
THRESHOLD_MARGIN_KM = 1e-3
"""An event whose distance differs from the threshold by at most this may be found by one side only."""
SLOW_KM_S = 0.1
"""Pairs with a smaller relative speed are slow. Their differences of time are reported separately.

The error of the time of a minimum is the error of the distance divided by the relative speed.
"""

_SIMULATED_OBJECTS = 2_000
_SIMULATED_AT = datetime(2026, 8, 8, tzinfo=UTC)
_PAIR = ["first", "second"]
_REASONS = ("threshold", "implausible state", "other kind", "end of the span", "unexplained")


@dataclass(frozen=True)
class EventComparison:
    """The matched and unmatched events of the reference (brute force) and the product (the screening).

    ``matched`` has one row for each event that both found: the reference's columns, and the product's columns
    with the suffix ``_product``. ``missed`` has the events that only the reference found, ``extra`` those
    that only the product found; the column ``reason`` explains them.
    """

    matched: pl.DataFrame
    missed: pl.DataFrame
    extra: pl.DataFrame


def measure_agreement(
    file: Path | None,
    *,
    start: datetime | None,
    hours: float,
    threshold_km: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Screen one GP file by brute force and by the product, and compare the events.

    Without a file, 2,000 objects are simulated. Without a start, the span begins at the first whole hour
    after 99 % of the epochs. In the result, `kinds` has the counts and the largest differences by kind of
    event (`Kind`), and `unmatched` the events that only one of the two found, with the reason. `reference_s`
    and `product_s` are seconds.
    """
    content = file.read_bytes() if file else _simulate()
    parsed = read_catalogue(content, file.name if file else "simulated")
    elements = Elements.from_arrow(parsed.elements.sort("sat_no").to_arrow())
    catalog = read_reference_catalog(content)
    shared = np.intersect1d(catalog.numbers, elements.sat_no)
    catalog = catalog.take(shared)
    elements = elements.take(np.flatnonzero(np.isin(elements.sat_no, shared)))
    start = start or _start_after(elements)
    minutes = round(hours * 60)
    say(f"{len(shared):,} objects, {minutes} minutes from {start:%Y-%m-%dT%H:%MZ}, {threshold_km:g} km")
    began = time.perf_counter()
    reference = find_events(catalog, start, minutes=minutes, threshold_km=threshold_km, say=say)
    reference_s = time.perf_counter() - began
    began = time.perf_counter()
    product = screen_events(elements, start, minutes=minutes, threshold_km=threshold_km)
    product_s = time.perf_counter() - began
    compared = compare_events(reference, product, elements, start, minutes=minutes, threshold_km=threshold_km)
    return {
        "objects": len(shared),
        "objects_of_one_reader": len(np.setxor1d(catalog.numbers, parsed.elements["sat_no"].to_numpy())),
        "start": f"{start:%Y-%m-%dT%H:%M:%SZ}",
        "hours": hours,
        "threshold_km": threshold_km,
        "reference_s": round(reference_s, 1),
        "product_s": round(product_s, 1),
        "kinds": {kind.value: _summarize(compared, reference, product, kind) for kind in Kind},
        "unmatched": [
            {"only_in": name, **row}
            for name, frame in (("reference", compared.missed), ("product", compared.extra))
            for row in frame.to_dicts()
        ],
    }


def screen_events(elements: Elements, start: datetime, *, minutes: int, threshold_km: float) -> pl.DataFrame:
    """Return the product's events in the columns of the reference (`EVENT_SCHEMA`).

    Args:
        elements: Element sets, sorted by catalog number.
        start: The beginning of the span, a whole minute.
        minutes: The length of the span.
        threshold_km: The largest distance of an event.
    """
    begin = _to_micros(start)
    screened = screen(elements, Span.whole(begin, begin + minutes * MINUTE), threshold_km=threshold_km)
    return encounters_to_events(screened, elements, start)


def encounters_to_events(screened: Encounters, elements: Elements, start: datetime) -> pl.DataFrame:
    """Convert the product's close approaches to the columns of the reference (`EVENT_SCHEMA`)."""
    return pl.DataFrame(
        {
            "first": elements.sat_no[screened.first],
            "second": elements.sat_no[screened.second],
            "kind": [kind.value for kind in screened.kinds],
            "time_s": (screened.tca_micros - _to_micros(start)) / 1e6,
            "miss_km": screened.miss_km,
            "speed_km_s": np.linalg.norm(screened.velocity, axis=1),
            "minutes": screened.minutes,
        },
        schema=EVENT_SCHEMA,
    )


def compare_events(
    reference: pl.DataFrame,
    product: pl.DataFrame,
    elements: Elements,
    start: datetime,
    *,
    minutes: int,
    threshold_km: float,
) -> EventComparison:
    """Match the events (`EVENT_SCHEMA`) of two implementations, and explain those without a match.

    Two events match if pair and kind are equal and the times differ by at most `MATCH_WITHIN_S`. Of several
    candidates, the nearest in time is taken. Events of the kind `together` match by pair alone, because a
    pair has only one such event and the closest moment of a formation may be ambiguous.

    Args:
        reference: The events of the reference.
        product: The events of the product.
        elements: The screened element sets, sorted by catalog number.
        start: The beginning of the span.
        minutes: The length of the span.
        threshold_km: The largest distance of an event.
    """
    left, right = reference.with_row_index("row"), product.with_row_index("row")
    apart = (pl.col("time_s") - pl.col("time_s_product")).abs()
    candidates = (
        left.join(right, on=[*_PAIR, "kind"], suffix="_product")
        .filter((apart <= MATCH_WITHIN_S) | (pl.col("kind") == Kind.TOGETHER.value))
        .sort(apart)
        .unique("row", keep="first", maintain_order=True)
        .unique("row_product", keep="first", maintain_order=True)
    )
    unmatched = [
        left.filter(~pl.col("row").is_in(candidates["row"].implode())).drop("row"),
        right.filter(~pl.col("row").is_in(candidates["row_product"].implode())).drop("row"),
    ]
    explained = [
        _explain(frame, other, elements, start, minutes=minutes, threshold_km=threshold_km)
        for frame, other in zip(unmatched, (product, reference), strict=True)
    ]
    matched = candidates.drop("row", "row_product").sort(*_PAIR, "time_s")
    return EventComparison(matched, *explained)


def _explain(
    events: pl.DataFrame,
    other: pl.DataFrame,
    elements: Elements,
    start: datetime,
    *,
    minutes: int,
    threshold_km: float,
) -> pl.DataFrame:
    """Add the ``reason`` why the other implementation may lack these events, one of `_REASONS`."""
    time_s = events["time_s"].to_numpy()
    near = events.with_row_index("row").join(other, on=_PAIR, suffix="_other")
    same_time = (pl.col("time_s") - pl.col("time_s_other")).abs() <= 60 + MATCH_WITHIN_S
    has_other_kind = np.isin(np.arange(events.height), near.filter(same_time)["row"].to_numpy())
    conditions = [
        np.abs(events["miss_km"].to_numpy() - threshold_km) <= THRESHOLD_MARGIN_KM,
        ~_has_possible_states(events, elements, start),
        has_other_kind,
        (time_s <= 1) | (time_s >= minutes * 60 - 1),
    ]
    reasons = np.select(conditions, _REASONS[:-1], _REASONS[-1])
    return events.with_columns(reason=pl.Series(reasons.tolist(), dtype=pl.String))


def _has_possible_states(events: pl.DataFrame, elements: Elements, start: datetime) -> np.ndarray[Any, Any]:
    """Return for each event (k,) whether the product considers the states of both objects plausible.

    The states are those at both ends of the event's minute.
    """
    is_possible = np.ones(events.height, np.bool_)
    # Few events are without a match, so a call for each is cheap.
    for k, (time_s, *pair) in enumerate(events.select("time_s", *_PAIR).rows()):
        rows = np.searchsorted(elements.sat_no, pair)
        objects = elements.take(rows)
        instants = _to_micros(start) + np.array([time_s // 60, time_s // 60 + 1]).astype(np.int64) * MINUTE
        ephemeris = propagate_satellites(objects.to_satrec_array(), instants)
        is_possible[k] = possible_states(ephemeris, objects).all()
    return is_possible


def _summarize(
    compared: EventComparison, reference: pl.DataFrame, product: pl.DataFrame, kind: Kind
) -> dict[str, Any]:
    """Return counts and the largest differences of one kind. A difference is None if there is no event."""
    matched = compared.matched.filter(pl.col("kind") == kind.value)
    time_ms = (pl.col("time_s") - pl.col("time_s_product")).abs() * 1e3
    miss_m = (pl.col("miss_km") - pl.col("miss_km_product")).abs() * 1e3
    is_slow = pl.col("speed_km_s") < SLOW_KM_S

    def quantile_of(events: pl.DataFrame, difference: pl.Expr, share: float = 1.0) -> float | None:
        quantile = events.select(difference.quantile(share)).item()
        return None if quantile is None else float(f"{quantile:.3g}")

    return {
        "reference": reference.filter(pl.col("kind") == kind.value).height,
        "product": product.filter(pl.col("kind") == kind.value).height,
        "matched": matched.height,
        "missed": compared.missed.filter(pl.col("kind") == kind.value).height,
        "extra": compared.extra.filter(pl.col("kind") == kind.value).height,
        "slow": matched.filter(is_slow).height,
        "largest_time_difference_ms": quantile_of(matched.filter(~is_slow), time_ms),
        "largest_time_difference_slow_ms": quantile_of(matched.filter(is_slow), time_ms),
        "median_miss_difference_m": quantile_of(matched, miss_m, 0.5),
        "p99_miss_difference_m": quantile_of(matched, miss_m, 0.99),
        "largest_miss_difference_m": quantile_of(matched, miss_m),
        "other_minutes": matched.filter(pl.col("minutes") != pl.col("minutes_product")).height,
    }


def _simulate() -> bytes:
    return format_tle(simulated_elements(seed=2026, objects=_SIMULATED_OBJECTS, epoch=_SIMULATED_AT)).encode()


def _start_after(elements: Elements) -> datetime:
    """Return the first whole hour after 99 % of the epochs. A few epochs of a real file are in its future."""
    seconds = float(np.quantile(elements.epoch_micros, 0.99)) / 1e6
    return datetime.fromtimestamp(0, UTC) + timedelta(hours=math.ceil(seconds / 3_600))


def _to_micros(instant: datetime) -> int:
    return round(instant.timestamp()) * 1_000_000


def print_agreement(found: dict[str, Any]) -> None:
    """Print counts and differences by kind, then each event without a match."""
    console = Console()
    kinds = Table(
        "",
        *found["kinds"],
        title=f"{found['objects']:,} objects, {found['hours']:g} h, within {found['threshold_km']:g} km",
    )
    for name in found["kinds"]["encounter"]:
        values = (one[name] for one in found["kinds"].values())
        kinds.add_row(name.replace("_", " "), *("" if value is None else f"{value:,}" for value in values))
    console.print(kinds)
    console.print(f"Brute force took {found['reference_s']} s, the screening {found['product_s']} s.")
    if found["unmatched"]:
        columns = list(found["unmatched"][0])
        unmatched = Table(*(column.replace("_", " ") for column in columns), title="Without a match")
        for row in found["unmatched"]:
            unmatched.add_row(
                *(f"{row[name]:.6g}" if type(row[name]) is float else str(row[name]) for name in columns)
            )
        console.print(unmatched)
