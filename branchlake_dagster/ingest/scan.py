"""The one pass over a batch's records, and the files of batches that no table will keep.

Files that a batch has written and that no table will keep: deleted as soon as that is certain.

They are data files that no commit names, and the metadata of staging tables. Commits of the batch's branch
name the latter; the sweeper of a discarded branch takes a missing one for swept. Data files of a scan that
failed were not reported by its tasks: they are found by their names in the tables' data folders.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

from pyarrow.fs import FileSelector
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from branchlake_dagster.errors import OutcomeUnknown
from branchlake_dagster.ingest.batch_tables import Evolving, Target
from branchlake_dagster.ingest.declaration import Expanded
from branchlake_dagster.ingest.formats import Format
from branchlake_dagster.ingest.offsets import Offsets
from branchlake_dagster.ingest.prepared_records import FOR, Prepared, fields_taken, row_columns
from branchlake_dagster.ingest.worker_writer import SENT_BACK, Work, WorkerTarget, writing

_ARROW = "spark.sql.execution.arrow"
_MOST_RECORDS, _MOST_BYTES = 2_500, 64 << 20
"""Of what Spark sends to its workers at once. The bytes it bounds by adding up all columns after each record,
which was a sixth of a batch's time. So it is asked to only where records may be large: in a session's first
batch, after one with large records, and after one that failed. Without that bound, 2,500 records of a
megabyte are more than a vector of Arrow holds."""
_NO_BOUND = (1 << 31) - 1
_small: WeakSet[SparkSession] = WeakSet()
"""Sessions whose last batch had small records."""
_cut_by: WeakKeyDictionary[SparkSession, int] = WeakKeyDictionary()
"""What each session bounds the bytes by."""


@dataclass
class Scanned:
    """What a pass found: data files by target, counts, and by `topic/partition` the latest time, in ms."""

    files: dict[int, list[DataFile]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    latest: dict[str, int] = field(default_factory=dict)

    def rows(self, target: int) -> int:
        """The rows written for a target."""
        return self.counts[f"rows/{target}"]

    def evolving(self) -> dict[int, Evolving]:
        """What the records want of the tables, by target."""
        found: dict[int, dict[str, set[str]]] = {}
        for name in self.counts:
            if name.startswith("evolve/"):
                _, target, how, what = name.split("/", 3)
                found.setdefault(int(target), {}).setdefault(how, set()).add(what)
        return {
            target: Evolving(**{how: frozenset(names) for how, names in wanted.items()})
            for target, wanted in found.items()
        }

    def names(self, families: Sequence[str]) -> dict[str, set[str]]:
        """What records have put into the names of tables that are not known, by family."""
        found: dict[str, set[str]] = {}
        for told in self.counts:
            if told.startswith("new/"):
                _, number, name = told.split("/", 2)
                found.setdefault(families[int(number)], set()).add(name)
        return found


def scan(
    records: DataFrame,
    ingest: Expanded,
    reading: Format,
    targets: Sequence[Target],
    floors: Mapping[str, Offsets],
    work: Work,
) -> Scanned:
    """Convert the records, write them to data files of the targets, and count.

    `floors` are by table the offsets before which it takes nothing; `targets` end with the dead letters.
    """
    session = records.sparkSession
    _cut_batches(session, _NO_BOUND if session in _small else _MOST_BYTES)
    _small.discard(session)
    frame = reading.read(records)
    letters = list(zip(work.topics, work.incarnations, strict=True)) if FOR in records.columns else []
    prepared = Prepared(ingest, reading, targets[:-1], floors, floors.get(targets[-1].name), letters)
    frame = prepared.columns(frame)
    sent = frame.mapInArrow(writing(work), from_arrow_schema(SENT_BACK)).toArrow()
    found = Scanned()
    for row in sent.to_pylist():
        if row["kind"] == "file":
            # Made by our own function on our own workers a moment ago.
            found.files.setdefault(row["target"], []).append(pickle.loads(row["payload"]))  # noqa: S301
        else:
            told = json.loads(row["payload"])
            found.counts.update(told["counts"])
            for name, at in told["latest"].items():
                found.latest[name] = max(at, found.latest.get(name, at))
    if found.counts["bytes"] * _MOST_RECORDS < _MOST_BYTES * found.counts["records"]:
        _small.add(session)
    return found


def _cut_batches(session: SparkSession, most_bytes: int) -> None:
    """Let a session bound the bytes by this; it is asked where that is new."""
    if _cut_by.get(session) != most_bytes:
        session.conf.set(f"{_ARROW}.maxRecordsPerBatch", str(_MOST_RECORDS))
        session.conf.set(f"{_ARROW}.maxBytesPerBatch", str(most_bytes))
        _cut_by[session] = most_bytes


def worker_targets(
    targets: Sequence[Target], staged: Mapping[int, tuple[str, Mapping[str, str]]]
) -> list[WorkerTarget]:
    """The targets as workers need them.

    `staged` has by target the metadata of its staging table, and that one's columns for what the record says
    of itself, by attribute.
    """
    rows = row_columns(targets[:-1])
    made = [
        WorkerTarget(
            staged[number][0] if number in staged else one.table.metadata.model_dump_json(),
            rows[number],
            {
                **(one.declared.attributes if one.declared else {}),
                **(
                    {column: attribute for attribute, column in staged[number][1].items()}
                    if number in staged
                    else {}
                ),
            },
            one.name,
            frozenset(fields_taken(one)),
        )
        for number, one in enumerate(targets[:-1])
    ]
    return [*made, WorkerTarget(targets[-1].table.metadata.model_dump_json(), None, {}, targets[-1].name)]


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
