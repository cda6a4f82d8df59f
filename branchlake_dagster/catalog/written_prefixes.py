"""The prefixes under which writers put files: recorded in the warehouse before the first file is written.

A search for orphaned files must list what was written for tables that no reference names any more, and must
not list what others keep in the same bucket. So each prefix is a small file in the warehouse, which outlives
dropped tables, deleted branches and a restored Nessie.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from pyarrow.fs import FileSelector
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster.catalog.stored_files import map_concurrently, read_content
from branchlake_dagster.stored_names import LakeFolder

_PATHS = ("write.data.path", "write.metadata.path", "write.object-storage.path", "write.folder-storage.path")
_UNIQUE = re.compile(r"(?<=_)(?:[0-9a-f]{16}_)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")
"""The end of a location that the catalog chose: the UUID of the table, after the batch of a staging table."""
_recorded_prefixes: set[tuple[str, str]] = set()
"""Warehouses and prefixes that this process has recorded. They are few: each is a table's name."""


def list_prefixes(location: str, properties: Mapping[str, str]) -> tuple[str, ...]:
    """The prefixes of all files that writers of a table create.

    Args:
        location: The location of the table.
        properties: Its properties, of which those with paths count.

    Returns:
        The location, then the paths that are not within it. Each ends with a slash, except that of a location
        which the catalog chose: there the UUID is left out, so that all tables of one name share a prefix.
    """
    table_folder = f"{location.rstrip('/')}/"
    paths = [f"{properties[name].rstrip('/')}/" for name in _PATHS if properties.get(name)]
    outside_paths = [path for path in paths if not path.startswith(table_folder)]
    base, _, name = location.rstrip("/").rpartition("/")
    unique = _UNIQUE.search(name)
    shared = f"{base}/{name[: unique.start()]}" if unique else table_folder
    return tuple(dict.fromkeys((shared, *outside_paths)))


def record_prefixes(io: FileIO, warehouse: str, metadata: TableMetadata) -> None:
    """Record the prefixes of a table, if they are not yet. Writers call this before they write a file.

    Costs one request to the storage for each prefix that is new to this process, and another one if it is new
    to the warehouse. Raises OSError.
    """
    for prefix in list_prefixes(metadata.location, metadata.properties):
        if (warehouse, prefix) in _recorded_prefixes:
            continue
        content = prefix.encode()
        name = hashlib.sha256(content).hexdigest()[:32]
        location = f"{_prefix_folder(warehouse)}/{name}"
        if _find_file_size(io, location) != len(content):  # a power cut may have left an empty file
            with io.new_output(location).create(overwrite=True) as stream:
                stream.write(content)
        _recorded_prefixes.add((warehouse, prefix))


def load_prefixes(io: FileIO, warehouse: str) -> frozenset[str]:
    """All prefixes that writers have recorded in a warehouse. One listing, and one request for each prefix.

    Raises OSError.
    """
    if not isinstance(io, PyArrowFileIO):
        return frozenset()
    folder = _prefix_folder(warehouse)
    scheme, netloc, path = io.parse_location(folder, io.properties)
    listing = io.fs_by_scheme(scheme, netloc).get_file_info(FileSelector(path, allow_not_found=True))
    locations = [f"{folder}/{info.base_name}" for info in listing if info.is_file]
    contents = map_concurrently(lambda location: read_content(io, location), locations, str)
    return frozenset(content.decode() for content in contents if content)


def _prefix_folder(warehouse: str) -> str:
    return f"{warehouse.rstrip('/')}/{LakeFolder.PREFIXES}"


def _find_file_size(io: FileIO, location: str) -> int | None:
    try:
        return len(io.new_input(location))
    except FileNotFoundError:
        return None
