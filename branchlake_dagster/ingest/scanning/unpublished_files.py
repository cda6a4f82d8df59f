"""Files that a batch has written and that no table will keep: deleted as soon as that is certain.

They are data files that no commit names, and the metadata of staging tables. Commits of the batch's branch
name the latter; the sweeper of a discarded branch takes a missing one for swept.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from pyiceberg.io import FileIO
from pyiceberg.table import Table

from branchlake_dagster.errors import OutcomeUnknown
from branchlake_dagster.ingest.scanning.scan import Scanned
from branchlake_dagster.ingest.scanning.targets import Target

_AT_ONCE = 8
"""Files that are deleted side by side: each is a request to the store."""
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
