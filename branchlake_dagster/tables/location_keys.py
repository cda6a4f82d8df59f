"""Compare file locations that engines spell differently, as sorted arrays of 64-bit numbers.

Two locations get the same key if they may name the same file. Scheme families (`s3a:`, `s3n:`, `s3:`),
the number of slashes, percent-encoding, letter case, Unicode form, `..` and symbolic links make no
difference, nor does what PyIceberg omits: tabs, line ends, and everything from the first `?` or `#`. So some
different files get the same key, and so do files whose 64-bit hashes collide. An equal key only ever keeps a
file, therefore each ambiguity keeps one file too many and never deletes one.

Another process computes the same keys only with the same code and versions of Polars, Python and Unicode.
`MetadataCache` compares these before it uses stored keys.
"""

from __future__ import annotations

import os
import posixpath
import re
import unicodedata
from collections.abc import Sequence
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import polars as pl

Keys = npt.NDArray[np.uint64]

_FAMILIES = {
    "s3a": "s3",
    "s3n": "s3",
    "gcs": "gs",
    "abfss": "abfs",
    "wasb": "abfs",
    "wasbs": "abfs",
    "": "file",
}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_OMITTED = r"[\t\r\n]|[?#][\s\S]*"
"""The parts of a location that PyIceberg omits, because it parses a location as a URL."""
_MAX_DECODINGS = 4
"""How often percent-encoding is decoded: engines encode a partition's value, some the whole path again."""
_MAX_CACHED_FOLDERS = 200_000
_SPECIAL = r"[%+]|[^\x00-\x7f]"
_FOLDER = pl.col("location").str.extract(r"^(.*)/", 1).fill_null("")
"""The folder of a location, as spelled; empty if the location has no slash."""


def split_scheme(location: str) -> tuple[str, str]:
    """Return the scheme family and the path with its bucket: `s3` and `bucket/key`, `file` and `/path`.

    A location without a scheme is a local path.
    """
    scheme, separator, rest = location.partition(":")
    if not separator or not _SCHEME.fullmatch(scheme):
        scheme, rest = "", location
    family = _FAMILIES.get(scheme.lower(), scheme.lower())
    path = rest.lstrip("/")
    if family != "file":
        return family, path
    return family, "/" + (path.removeprefix("localhost/") if rest.startswith("//localhost/") else path)


def canonical_location(location: str) -> str:
    """Return the one spelling that all equivalent spellings of a location share, such as `s3:/bucket/key`.

    It has no slash at the end. Symbolic links of local paths are resolved.
    """
    family, path = split_scheme(re.sub(_OMITTED, "", location))
    if family == "file":
        path = os.path.realpath(path)
    return f"{family}:{_fold(path)}".rstrip("/")


def is_inside(canonical: str, canonical_folder: str) -> bool:
    """Return whether a location is in a folder, both as canonical locations. A folder is not in itself."""
    return canonical.startswith(f"{canonical_folder}/")


def _fold(path: str) -> str:
    for _ in range(_MAX_DECODINGS):
        decoded = unquote(path, errors="replace")
        if decoded == path:
            break
        path = decoded
    path = unicodedata.normalize("NFC", path.replace("+", " ")).lower()
    return posixpath.normpath(f"/{path.lstrip('/')}") if path else ""


class LocationKeyer:
    """Computes 64-bit keys of file locations. One object must serve all locations that are compared.

    The cost is 1 µs per location, and 20 µs per folder for its symbolic links.
    """

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}

    def keys(self, locations: Sequence[str] | pl.Series) -> Keys:
        """Return the 64-bit key of each location, in the order of the locations.

        Locations that may name the same file have the same key.
        """
        column = pl.Series("location", locations, dtype=pl.String)
        if column.is_empty():
            return np.empty(0, np.uint64)
        if column.str.contains(_OMITTED).any():
            column = column.str.replace_all(_OMITTED, "")
        parts = column.to_frame().select(
            _FOLDER.alias("folder"),
            pl.col("location").str.extract(r"([^/]*)$", 1).str.to_lowercase().alias("name"),
        )
        folders = parts["folder"].unique()
        spelled = folders.to_list()
        canonical = pl.Series(
            "canonical", [self._canonical_folder(each) for each in spelled], dtype=pl.String
        )
        parts = parts.with_columns(
            pl.col("folder").replace_strict(folders, canonical, return_dtype=pl.String).alias("canonical")
        )
        special = parts["name"].str.contains(_SPECIAL)
        if special.any():
            names = parts["name"].to_list()
            flags = special.to_list()
            folded = [_fold(name)[1:] if flag else name for name, flag in zip(names, flags, strict=True)]
            parts = parts.with_columns(pl.Series("name", folded, dtype=pl.String))
        combined = parts.select(pl.concat_str("canonical", pl.lit("/"), "name").alias("key"))["key"]
        return combined.hash(seed=0).to_numpy()

    def folders(self, locations: pl.Series) -> list[str]:
        """Return the distinct folders of locations, as spelled there, without the slash at the end."""
        column = locations.rename("location")
        return column.to_frame().select(_FOLDER.alias("folder"))["folder"].unique().to_list()

    def canonical_folders(self, folders: Sequence[str]) -> list[str]:
        """Return the canonical location of each folder. Keys are computed from it and from the file's name.

        Links of local paths are resolved when this object first meets a folder.
        """
        return [self._canonical_folder(folder) for folder in folders]

    def _canonical_folder(self, folder: str) -> str:
        canonical = self._folders.get(folder)
        if canonical is None:
            if len(self._folders) >= _MAX_CACHED_FOLDERS:
                self._folders.clear()
            canonical = self._folders[folder] = canonical_location(folder)
        return canonical


class KeySet:
    """A growing set of keys of locations (`LocationKeyer.keys`), in sorted arrays.

    It uses 8 bytes per key, and at most twice that while it grows.
    """

    def __init__(self) -> None:
        self._sorted: Keys = np.empty(0, np.uint64)
        self._pending: list[Keys] = []
        self._pending_count = 0

    def add(self, keys: Keys) -> None:
        """Add keys. Keys that the set has already are allowed."""
        if keys.size:
            self._pending.append(keys)
            self._pending_count += keys.size
            if self._pending_count > max(100_000, self._sorted.size // 2):
                self._merge()

    def contains(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return for each key whether the set contains it, as an array of the same size."""
        self._merge()
        if not self._sorted.size:
            return np.zeros(keys.size, np.bool_)
        positions = np.searchsorted(self._sorted, keys)
        positions[positions == self._sorted.size] = 0
        return np.asarray(self._sorted[positions] == keys)

    def __len__(self) -> int:
        self._merge()
        return int(self._sorted.size)

    def _merge(self) -> None:
        if self._pending:
            # NumPy's `unique` uses a hash table, which took minutes for 10,000,000 keys.
            keys = np.concatenate([self._sorted, *self._pending])
            self._pending, self._pending_count = [], 0
            keys.sort()
            is_new = np.ones(keys.size, np.bool_)
            np.not_equal(keys[1:], keys[:-1], out=is_new[1:])
            self._sorted = keys if is_new.all() else keys[is_new]
