"""Decide which listed files are orphans. Pure functions over paths, times and keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl

from branchlake_dagster.garbage_collection.warehouse_files import to_microseconds
from branchlake_dagster.garbage_collection.writer_claims import WriterClaim, earliest_claim
from branchlake_dagster.tables.location_keys import (
    Keys,
    KeySet,
    canonical_location,
    is_inside,
)


class FileVerdict(StrEnum):
    """Why a file is kept, or `ORPHAN`."""

    ORPHAN = "orphan"
    REACHABLE = "reachable"
    YOUNG = "young"
    """Younger than the grace period, or its time is in the future."""
    HIDDEN = "hidden"
    """The file's name or a folder's name begins with `.` or `_`, as names of other tools' files do."""
    CLAIMED = "claimed"
    """A living writer may have written the file."""
    PROTECTED = "protected"
    """Metadata of the file's table, or of any table in the warehouse, cannot be read."""


_HIDDEN = r"(^|/)(\.|_[^/]*$|_[^/=]*/)"


def find_hidden(relative_paths: pl.Series) -> npt.NDArray[np.bool_]:
    """Return for each path below a table's folder whether a part of it begins with `.` or `_`.

    A folder `_column=value` is a partition, so it is not hidden.
    """
    return relative_paths.str.contains(_HIDDEN).to_numpy()


@dataclass(frozen=True)
class OrphanRule:
    """The rule that decides at one moment which files are orphans: unreachable, and older than `grace`.

    `now` is the earliest time of all clocks, so that no file seems older than it is.
    """

    now: datetime
    grace: timedelta
    claims: tuple[WriterClaim, ...] = ()
    protected_folders: frozenset[str] = frozenset()
    """Canonical folders whose files are all kept."""

    @cached_property
    def newest_change_us(self) -> int:
        """The latest time, in µs since 1970, that an orphan may have."""
        return to_microseconds(self.now - self.grace)

    def judge(
        self, keys: Keys, last_change_us: npt.NDArray[np.int64], locations: Sequence[str], reachable: KeySet
    ) -> list[FileVerdict]:
        """Return the verdict of each file. Files that are hidden must not be passed.

        `keys`, `last_change_us` (`ListedFile.last_change_us`) and `locations` are parallel: one element per
        file. `reachable` has the keys of all reachable files.
        """
        verdicts = [FileVerdict.REACHABLE] * int(keys.size)
        claimed_since = earliest_claim(self.claims, self.now)
        claimed_since_us = math.inf if claimed_since is None else to_microseconds(claimed_since)
        for index in np.flatnonzero(~reachable.contains(keys)).tolist():
            written_us = int(last_change_us[index])
            if written_us > self.newest_change_us:
                verdicts[index] = FileVerdict.YOUNG
            elif written_us >= claimed_since_us:
                verdicts[index] = FileVerdict.CLAIMED
            elif _is_in_any(locations[index], self.protected_folders):
                verdicts[index] = FileVerdict.PROTECTED
            else:
                verdicts[index] = FileVerdict.ORPHAN
        return verdicts


def _is_in_any(location: str, folders: frozenset[str]) -> bool:
    if not folders:
        return False
    canonical = canonical_location(location)
    return any(is_inside(canonical, folder) for folder in folders)
