"""The prefixes under which writers create files, recorded in the warehouse before the first file.

A search for orphaned files must list the files of tables that no reference names any more. It must not list
other files in the same bucket. Therefore each prefix is recorded as a small file in the warehouse, which
outlives dropped tables, deleted branches and a restored Nessie.
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
"""The end of a location that the catalog chose: the table's UUID, after the batch id of a staging table."""
_recorded_prefixes: set[tuple[str, str]] = set()
"""Warehouses and prefixes that this process has recorded. They are few: one for each table name."""


def list_prefixes(location: str, properties: Mapping[str, str]) -> tuple[str, ...]:
    """List the prefixes of all files that writers of a table create.

    Args:
        location: The location of the table.
        properties: The table's properties; those with paths are read.

    Returns:
        The prefix of the location, then the paths outside it. Each ends with a slash, except for a location
        that the catalog chose: there the UUID is left out, so all tables of one name share a prefix.
    """
    table_folder = f"{location.rstrip('/')}/"
    paths = [f"{properties[name].rstrip('/')}/" for name in _PATHS if properties.get(name)]
    outside_paths = [path for path in paths if not path.startswith(table_folder)]
    base, _, name = location.rstrip("/").rpartition("/")
    unique = _UNIQUE.search(name)
    shared = f"{base}/{name[: unique.start()]}" if unique else table_folder
    return tuple(dict.fromkeys((shared, *outside_paths)))


def record_prefixes(io: FileIO, warehouse: str, metadata: TableMetadata) -> None:
    """Record the prefixes of a table, if they are not recorded yet. Writers call this before they write.

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
    """Load all prefixes that writers have recorded in a warehouse.

    Costs one listing, and one request for each prefix. Raises OSError.
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
