"""Draw reproducible pseudo-random numbers per object, independent of the other objects.

A generator that is used in catalog order would give every object new numbers as soon as one object appears or
decays. A hash of the object's number does not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from branchlake_dagster.sda.orbits.frames import Floats


def draw_uniform(keys: npt.NDArray[np.int64], *salt: int) -> Floats:
    """Return numbers in (0, 1), one per key (n,), by splitmix64 (Steele, Lea and Flood, OOPSLA 2014).

    Numbers with different `salt` are independent.
    """
    state = keys.astype(np.uint64)
    with np.errstate(over="ignore"):
        for word in salt:
            state = _mix(state + np.uint64(word & 0xFFFF_FFFF_FFFF_FFFF))
        state = _mix(state)
    return ((state >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53


def hash_keys(keys: npt.NDArray[np.int64], salt: int, *more: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return a hash of 64 bits for each row of several key columns: `keys` and `more`, all (n,).

    Hashes with different `salt` are independent.
    """
    state = keys.astype(np.uint64)
    with np.errstate(over="ignore"):
        state = _mix(state + np.uint64(salt))
        for other in more:
            state = _mix(state ^ other.astype(np.uint64))
    return state


def track_numbers(track_ids: pl.Series) -> npt.NDArray[np.uint32]:
    """Return a local track number (n,) for each simulated track id: a hash from 1 to 2**32 - 1.

    A sensor does not know which object it sees, so the numbers do not depend on the object alone.
    """
    if track_ids.is_empty():
        return np.zeros(0, np.uint32)
    texts = np.array(track_ids.to_list(), dtype=np.bytes_)
    width = -(-max(texts.itemsize, 1) // 8) * 8
    words = texts.astype(f"S{width}").view("<i8").reshape(len(texts), -1)
    hashed = hash_keys(words[:, 0], 11, *(words[:, column] for column in range(1, words.shape[1])))
    return (1 + hashed % np.uint64(2**32 - 1)).astype(np.uint32)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def draw_normal(keys: npt.NDArray[np.int64], *salt: int) -> Floats:
    """Return standard normal numbers, one per key (n,), by Box-Muller on two hashes."""
    radius = np.sqrt(-2 * np.log(draw_uniform(keys, *salt, 1)))
    drawn: Floats = radius * np.cos(2 * np.pi * draw_uniform(keys, *salt, 2))
    return drawn
