"""Compute the states of both objects of published close approaches.

The published list has no states. They are computed again from the element sets that its rows name by epoch.
If the relative position differs from the row's, these are not the element sets that were screened, and the
row gets no states.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from branchlake_dagster.sda.messages.cdm import Party
from branchlake_dagster.sda.messages.errors import NotAMessage
from branchlake_dagster.sda.orbits.frames import Floats, Micros
from branchlake_dagster.sda.orbits.inertial import Frame, rotate_to_frame
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.trust.differences import rtn_axes, states_at

SAME_KM = 0.02
"""The largest difference of the relative position. In eccentric orbits the list is within meters of SGP4."""
_TEXTS = ("object_name", "object_id", "source", "data_mode")


def parties_of(
    found: pl.DataFrame, sets: pl.DataFrame, kinds: dict[int, str | None]
) -> list[tuple[Party, Party] | NotAMessage]:
    """Return for each row its two objects, or an error that says why there are none.

    Args:
        found: Rows of ``sda.conjunctions``.
        sets: Element sets with `Elements.COLUMNS`, and, if they exist, ``object_name``, ``object_id``,
            ``source`` and ``data_mode``. There may be several of one object and epoch.
        kinds: The type of each object, by its catalog number.
    """
    by_object: dict[tuple[int, int], list[int]] = {}
    elements = Elements.from_arrow(sets.to_arrow())
    for row, key in enumerate(zip(elements.sat_no.tolist(), elements.epoch_micros.tolist(), strict=True)):
        by_object.setdefault(key, []).append(row)
    wanted = [
        [by_object.get((int(number), int(epoch)), []) for number, epoch in _keys(found, k).iter_rows()]
        for k in (1, 2)
    ]
    tca = found["tca"].dt.epoch("us").to_numpy()
    reported_positions = found.select([f"relative_position_{axis}_km" for axis in "rtn"]).to_numpy()
    # All combinations of element sets for all rows. Nearly every row has one.
    combined = [
        (place, one, other)
        for place in range(found.height)
        for one in wanted[0][place]
        for other in wanted[1][place]
    ]
    places, *rows = np.array(combined, np.int64).reshape(-1, 3).T
    at = tca[places]
    states = [states_at(elements, one, at) for one in rows]
    relative = np.einsum("kij,kj->ki", rtn_axes(*states[0]), states[1][0] - states[0][0])
    off = np.linalg.norm(relative - reported_positions[places], axis=1)
    texts = [name for name in _TEXTS if name in sets.columns]
    result: list[tuple[Party, Party] | NotAMessage] = []
    for place, event in enumerate(found["event_id"].to_list()):
        candidates = np.flatnonzero(places == place)
        candidates = candidates[off[candidates] <= SAME_KM]
        if not len(candidates):
            result.append(_no_states_error(event, [len(one[place]) for one in wanted], off[places == place]))
            continue
        best = int(candidates[np.argmin(off[candidates])])
        one, other = (
            _party(sets.row(int(rows[k][best]), named=True), texts, kinds, states[k], best, at)
            for k in (0, 1)
        )
        result.append((one, other))
    return result


def _keys(found: pl.DataFrame, which: int) -> pl.DataFrame:
    return found.select(f"sat{which}_object_designator", pl.col(f"sat{which}_element_epoch").dt.epoch("us"))


def _no_states_error(event: str, there: list[int], off: Floats) -> NotAMessage:
    if not all(there):
        return NotAMessage(
            f"{event} has no states: the element sets it was screened with are not in the lake any more.",
            hint="Launch conjunctions_job for a new list.",
        )
    return NotAMessage(
        f"{event} has no states: the lake's element sets of those epochs are others than were screened, "
        f"{float(np.min(off)) * 1e3:,.0f} m off.",
        hint="Launch conjunctions_job for a new list.",
    )


def _party(
    row: dict[str, Any],
    texts: list[str],
    kinds: dict[int, str | None],
    states: tuple[Floats, Floats],
    place: int,
    micros: Micros,
) -> Party:
    one = slice(place, place + 1)
    position, velocity = (
        rotate_to_frame(part[one], micros[one], Frame.TEME, Frame.GCRF)[0] for part in states
    )
    said = {name: row[name] for name in texts}
    return Party(
        row["sat_no"],
        said.get("object_name"),
        said.get("object_id"),
        kinds.get(row["sat_no"]),
        row["epoch"],
        said.get("source"),
        said.get("data_mode"),
        position.tolist(),
        velocity.tolist(),
    )
