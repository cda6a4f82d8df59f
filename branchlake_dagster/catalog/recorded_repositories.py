"""Records in a warehouse which Nessie repositories have tables there.

A collection of unreachable files knows what its own Nessie repository needs. In a warehouse that two
repositories share, it would delete the files of the other one. Therefore each repository leaves a file with
its identity in the warehouse, and a collection ends if it finds the file of another repository.

The creation time of a repository is its identity: it has nanoseconds, it is in Nessie's database, and Nessie
returns it to every client.
"""

from __future__ import annotations

import json
import re
import socket
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlsplit

from pyarrow.fs import FileSelector
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO

from branchlake_dagster.catalog.stored_files import (
    is_local,
    local_path,
    map_concurrently,
    read_content,
    synchronize_files,
)
from branchlake_dagster.nessie import NessieClient
from branchlake_dagster.stored_names import LakeFolder

_ENDING = ".json"
_recorded: set[tuple[str, str]] = set()
"""Pairs of a warehouse and a Nessie address for which this process has recorded the repository."""


@dataclass(frozen=True)
class RecordedRepository:
    """A Nessie repository that is recorded in a warehouse.

    `location` is the file. `created_at` is the repository's creation time as Nessie writes it; empty if the
    file is damaged. `nessie_uri`, without credentials, and `host` are those of the process that has written
    the file at the time `recorded_at`; empty if the file does not have them.
    """

    location: str
    created_at: str = ""
    nessie_uri: str = ""
    host: str = ""
    recorded_at: str = ""


def record_repository(io: FileIO, warehouse: str, client: NessieClient) -> None:
    """Record the client's repository in a warehouse, if it is not recorded yet. Writers call this first.

    Several processes may call this at the same time. Nothing is recorded if the server does not report when
    its repository was created. Costs a request to Nessie and one to the storage, once per process and
    warehouse. Raises OSError and NessieError.
    """
    key = (warehouse, client.uri)
    if key in _recorded:
        return
    created_at = client.config().repository_created_at
    if created_at:
        location = f"{_find_folder(warehouse)}/{re.sub(r'[^0-9A-Za-z.]', '-', created_at)}{_ENDING}"
        try:
            is_recorded = _parse(location, read_content(io, location)).created_at == created_at
        except FileNotFoundError:
            is_recorded = False
        if not is_recorded:
            _write_record(io, location, created_at, client.uri)
    _recorded.add(key)


def _write_record(io: FileIO, location: str, created_at: str, nessie_uri: str) -> None:
    """Atomic: readers see no file, or the whole file. Raises OSError."""
    address = urlsplit(nessie_uri)
    content = json.dumps(
        {
            "created_at": created_at,
            "nessie_uri": f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}",
            "host": socket.gethostname(),
            "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    ).encode()
    # An object store replaces objects atomically. A local file needs a rename for that.
    target = f"{location}.{uuid.uuid4().hex}.tmp" if is_local(location) else location
    with io.new_output(target).create(overwrite=True) as stream:
        stream.write(content)
    if target != location:
        local_path(target).replace(local_path(location))
        synchronize_files([location])


def load_repositories(io: FileIO, warehouse: str) -> tuple[RecordedRepository, ...]:
    """Load all repositories that are recorded in a warehouse, by location. Raises OSError.

    Costs one listing, and one request for each of them.
    """
    if not isinstance(io, PyArrowFileIO):
        return ()
    folder = _find_folder(warehouse)
    scheme, netloc, path = io.parse_location(folder, io.properties)
    listing = io.fs_by_scheme(scheme, netloc).get_file_info(FileSelector(path, allow_not_found=True))
    names = [info.base_name for info in listing if info.is_file and info.base_name.endswith(_ENDING)]
    locations = [f"{folder}/{name}" for name in sorted(names)]
    contents = map_concurrently(lambda location: read_content(io, location), locations, str)
    return tuple(map(_parse, locations, contents))


def _parse(location: str, content: bytes) -> RecordedRepository:
    try:
        fields = dict(json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return RecordedRepository(location)
    names = ("created_at", "nessie_uri", "host", "recorded_at")
    return RecordedRepository(location, *(str(fields.get(name) or "") for name in names))


def _find_folder(warehouse: str) -> str:
    return f"{warehouse.rstrip('/')}/{LakeFolder.REPOSITORIES}"
