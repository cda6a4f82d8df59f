"""Data files that a batch has written and that no commit will name: deleted as soon as that is certain.

Only data files. The metadata of a staging table stays: commits of the batch's branch name it, and the sweeper
of a discarded branch has to read it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from pyiceberg.io import FileIO

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
    wanted = [
        (targets[number].table.io, file.file_path)
        for number, files in scanned.files.items()
        if numbers is None or number in numbers
        for file in files
    ]
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
