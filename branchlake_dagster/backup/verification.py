"""Verify a backup: start Nessie on a copy of the saved store, and read every table of `main`.

The tables' metadata contains the paths of the original files. The copies in the backup are read instead.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.typedef import EMPTY_DICT, Properties

from branchlake_dagster.backup.backup_record import BackupRecord, backup_name, verification_name
from branchlake_dagster.backup.errors import BackupDamaged
from branchlake_dagster.backup.file_copy import remove_folder
from branchlake_dagster.backup.lake_folders import NESSIE_PART
from branchlake_dagster.catalog.stored_files import is_local, local_path, read_metadata
from branchlake_dagster.embedded.servers import EmbeddedServers
from branchlake_dagster.embedded.state_folder import make_private_folder
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import ContentEntry, IcebergTable
from branchlake_dagster.settings import Settings

_THREADS = 4


@dataclass(frozen=True)
class VerifiedTables:
    """The result of a verification.

    `main_hash` is the hash of `main` in the backup. `rows` is the number of rows in all data files that were
    read; delete files are not applied. `inside` are the names of the tables that were read. `outside` are the
    tables with files outside the saved folders: the backup does not contain these tables completely.
    """

    main_hash: str
    rows: int
    inside: tuple[str, ...]
    outside: tuple[str, ...]


class _MovedFileIO(PyArrowFileIO):
    """A FileIO that opens the copy in the backup for the location of an original file.

    `folders` maps the original folders to their copies.
    """

    def __init__(self, folders: Mapping[Path, Path], properties: Properties = EMPTY_DICT) -> None:
        super().__init__(properties)
        self._folders = folders

    def new_input(self, location: str) -> PyArrowFile:
        """Return the copy of a file, to read it.

        Raises _FileOutside if no saved folder contains the location.
        """
        return super().new_input(str(self.find_copy(location)))

    def find_copy(self, location: str) -> Path:
        """Return the path of a file's copy. Raises _FileOutside if no saved folder contains the location."""
        if is_local(location):
            path = local_path(location)
            for source, copy in self._folders.items():
                if path.is_relative_to(source):
                    return copy / path.relative_to(source)
        raise _FileOutside(f"The file {location} is not in a folder that was saved.")


class _FileOutside(BackupDamaged):
    """A file of a table is not below the folders that were saved."""


def verify_backup(
    folder: Path, record: BackupRecord, settings: Settings, *, say: Callable[[str], None] = lambda _: None
) -> VerifiedTables:
    """Verify that all tables of `main` in a backup can be read.

    The data and delete files of each table's current snapshot are checked. Parquet files are read completely.
    Files of other formats are not read; only their size is compared with the manifest. Nessie's store is
    copied next to the backup, and a Nessie server is started on the copy. The backup is not changed.
    `settings` are those of the lake, whose downloaded jars are used.

    A table with files outside the saved folders is not an error: the result names it in `outside`. Raises
    BackupDamaged if a table cannot be read, or if every table has files outside the saved folders. Raises
    ServerDidNotStart.
    """
    folders = {Path(part.source): folder / part.name for part in record.parts}
    with _open_scratch_folder(folder, record, settings) as root:
        server_settings = settings.model_copy(update={"state_dir": root, "nessie_port": 0, "warehouse": None})
        servers = EmbeddedServers(server_settings, notify=say)
        say("Reading the tables of the backup …")
        lake = Lakehouse(server_settings, say=say)
        try:
            main = lake.nessie.reference(MAIN)
            entries = list(lake.nessie.entries(f"@{main.hash}", fetch_content=True))
            return _read_tables(main.hash or "", entries, _MovedFileIO(folders), say)
        finally:
            servers.stop_all()


@contextmanager
def _open_scratch_folder(folder: Path, record: BackupRecord, settings: Settings) -> Iterator[Path]:
    """Create a temporary state folder with a copy of Nessie's saved store, and yield its path.

    It is next to the backup, because that disk probably has enough space. It is deleted at the end.
    """
    root = folder.with_name(verification_name(backup_name(datetime.fromisoformat(record.taken_at))))
    lake_scratch = make_private_folder(settings.state_dir / "tmp")
    with tempfile.TemporaryDirectory(prefix="verification-", dir=lake_scratch) as java_folder:
        try:
            root.mkdir(mode=0o700)
            shutil.copytree(folder / NESSIE_PART, root / "nessie")
            # Nessie loads its native libraries from here, which a disk for backups may prohibit (noexec).
            (root / "tmp").symlink_to(java_folder)
            (root / "jars").mkdir()
            for listing in (settings.state_dir / "jars").glob("*.classpath"):
                shutil.copy2(listing, root / "jars")
            yield root
        finally:
            with suppress(FileNotFoundError):
                remove_folder(root)


def _read_tables(
    main_hash: str, entries: Iterable[ContentEntry], io: _MovedFileIO, say: Callable[[str], None]
) -> VerifiedTables:
    rows = 0
    inside: list[str] = []
    outside: list[str] = []
    for entry in entries:
        if not isinstance(entry.content, IcebergTable):
            continue
        name = str(entry.key)
        try:
            table_rows = _count_rows(entry.content, io)
        except _FileOutside:
            outside.append(name)
            continue
        except Exception as error:  # Avro, zlib, PyArrow and PyIceberg raise many classes for a damaged file
            raise BackupDamaged(
                f"The table {name} in the backup cannot be read: {error or type(error).__name__}",
                hint="Make another backup. If that fails too, the lake has lost or damaged the file:"
                " restore an older backup, or write the table anew.",
                reason="table_unreadable",
                table=name,
            ) from error
        inside.append(name)
        rows += table_rows
        say(f"{name}: {table_rows:,} rows read")
    if outside and not inside:
        raise BackupDamaged(
            f"The backup has no table of main. Their files are outside the saved folders, as those of table"
            f" {outside[0]}.",
            hint="Set BRANCHLAKE_WAREHOUSE to the warehouse of the lake, as Dagster has it.",
            reason="tables_outside",
            table=outside[0],
        )
    return VerifiedTables(main_hash, rows, tuple(inside), tuple(outside))


def _count_rows(content: IcebergTable, io: _MovedFileIO) -> int:
    """Read the current data and delete files of a table. Return the number of rows in data files.

    Raises _FileOutside, and any other Exception for a file that is missing or damaged.
    """
    metadata = read_metadata(io, content.metadata_location)
    snapshot = metadata.current_snapshot()
    if snapshot is None:
        return 0
    files = [
        entry.data_file
        for manifest in snapshot.manifests(io)
        for entry in manifest.fetch_manifest_entry(io, discard_deleted=True)
    ]
    with ThreadPoolExecutor(_THREADS) as pool:
        return sum(pool.map(lambda file: _read_file(file, io), files))


def _read_file(file: DataFile, io: _MovedFileIO) -> int:
    path = io.find_copy(file.file_path)
    size = path.stat().st_size
    if size != file.file_size_in_bytes:
        raise ValueError(f"{path} has {size} bytes instead of {file.file_size_in_bytes}")
    if file.file_format != FileFormat.PARQUET:
        return 0 if file.content != DataFileContent.DATA else int(file.record_count)
    with pq.ParquetFile(path) as parquet:
        rows = sum(batch.num_rows for batch in parquet.iter_batches())
    if rows != file.record_count:
        raise ValueError(f"{path} has {rows} rows instead of {file.record_count}")
    return 0 if file.content != DataFileContent.DATA else rows
