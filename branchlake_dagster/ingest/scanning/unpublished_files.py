"""Files that a batch has written and that no table will keep: deleted as soon as that is certain.

They are data files that no commit names, and the metadata of staging tables. Commits of the batch's branch
name the latter; the sweeper of a discarded branch takes a missing one for swept. Data files of a scan that
failed were not reported by its tasks: they are found by their names in the tables' data folders.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pyarrow.fs import FileSelector
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import Table
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil

from branchlake_dagster.errors import OutcomeUnknown
from branchlake_dagster.ingest.scanning.scan import Scanned
from branchlake_dagster.ingest.scanning.targets import Target
from branchlake_dagster.ingest.scanning.writer import Work

_AT_ONCE = 8
"""Files that are deleted side by side: each is a request to the store."""
LISTED_UP_TO = 100_000
"""Data files of a table whose data folder is listed after a failed scan: a page of a listing has 1,000."""
_log = logging.getLogger(__name__)


def delete_files(scanned: Scanned, targets: Sequence[Target], numbers: Collection[int] | None = None) -> None:
    """Delete the data files of a pass over the records; with `numbers` those of these targets only.

    Raises nothing: a file that cannot be deleted is logged, and stays for whoever searches for orphans.
    """
    _delete(
        [
            (targets[number].table.io, file.file_path)
            for number, files in scanned.files.items()
            if numbers is None or number in numbers
            for file in files
        ]
    )


def delete_staging_metadata(tables: Iterable[Table]) -> None:
    """Delete metadata files, manifest lists and manifests of staging tables that their branch has dropped.

    Reads one manifest list per table with rows. Raises nothing, as `delete_files`.
    """
    wanted: dict[str, FileIO] = {}
    for table in tables:
        metadata, snapshot = table.metadata, table.current_snapshot()
        paths = [table.metadata_location, *(one.metadata_file for one in metadata.metadata_log)]
        if snapshot is not None:
            paths.append(snapshot.manifest_list)
            try:
                paths += [one.manifest_path for one in snapshot.manifests(table.io)]
            except Exception as error:  # noqa: BLE001 - whatever a store raises; it is logged
                _log.warning(
                    "%s was not read, and its manifests were not deleted: %s: %s",
                    snapshot.manifest_list,
                    type(error).__name__,
                    error,
                )
        wanted |= dict.fromkeys(paths, table.io)
    _delete([(io, path) for path, io in wanted.items()])


def _delete(wanted: Sequence[tuple[FileIO, str]]) -> None:
    if not wanted:
        return
    with ThreadPoolExecutor(min(_AT_ONCE, len(wanted))) as pool:
        for (_, path), error in zip(wanted, pool.map(lambda one: _deleted(*one), wanted), strict=True):
            if error is not None:
                _log.warning("%s was not deleted: %s: %s", path, type(error).__name__, error)


def _deleted(io: FileIO, path: str) -> Exception | None:
    try:
        io.delete(path)
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - whatever a store raises; it is logged
        return error
    return None


@contextlib.contextmanager
def deleted_on_failure(
    scanned: Scanned, targets: Sequence[Target], numbers: Collection[int] | None = None
) -> Iterator[None]:
    """Delete the data files if what is done within fails, unless a commit may have happened all the same."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OutcomeUnknown):
            delete_files(scanned, targets, numbers)
        raise


@dataclass
class FailedScans:
    """Scans of a batch that failed. Their tasks may have written data files that they did not report."""

    _scans: list[tuple[Work, FileIO]] = field(default_factory=list)

    @contextlib.contextmanager
    def remembering(self, work: Work, io: FileIO) -> Iterator[None]:
        """Remember the scan of `work` if it fails; `io` is the FileIO of its tables."""
        try:
            yield
        except Exception:
            self._scans.append((work, io))
            raise

    def delete_files(self) -> None:
        """Delete what these scans wrote: one listing of each table's data folder, however many scans failed.

        A table with more than `LISTED_UP_TO` data files is not searched, and a task that goes on after its
        scan has failed may write files later: these files stay, as those that cannot be deleted do. Raises
        nothing.
        """
        found: dict[str, FileIO] = {}
        searched: dict[str, tuple[FileIO, set[str]]] = {}
        for work, io in self._scans:
            for target in work.targets:
                folder = searchable_folder(TableMetadataUtil.parse_raw(target.metadata_json))
                if folder is None:
                    _log.warning("%s has too many files to be searched after a failed scan.", target.name)
                else:
                    searched.setdefault(folder, (io, set()))[1].add(work.file_name_part)
        for folder, (io, parts) in searched.items():
            try:
                found |= dict.fromkeys(files_named(io, folder, parts), io)
            except Exception as error:  # noqa: BLE001 - whatever a store raises; it is logged
                _log.warning(
                    "%s was not searched after a failed scan: %s: %s", folder, type(error).__name__, error
                )
        _delete([(io, path) for path, io in found.items()])
        self._scans.clear()


def searchable_folder(metadata: TableMetadata) -> str | None:
    """The data folder of a table; None if its current snapshot has more than `LISTED_UP_TO` data files."""
    snapshot = metadata.current_snapshot()
    summary = snapshot.summary if snapshot is not None else None
    count = summary.additional_properties.get("total-data-files", "0") if summary is not None else "0"
    if int(count) > LISTED_UP_TO:
        return None
    return load_location_provider(metadata.location, metadata.properties).data_path


def files_named(io: FileIO, folder: str, parts: Collection[str]) -> list[str]:
    """The locations of the files in a folder, and in those below it, whose name contains one of `parts`."""
    if not isinstance(io, PyArrowFileIO):
        return []
    scheme, netloc, root = io.parse_location(folder, io.properties)
    everything = FileSelector(root, recursive=True, allow_not_found=True)
    return [
        folder + info.path[len(root) :]
        for info in io.fs_by_scheme(scheme, netloc).get_file_info(everything)
        if info.is_file and any(part in info.base_name for part in parts)
    ]
