"""The pass over a batch's records, and the deletion of files that no table will keep.

Such files are data files that no commit names, and the metadata of staging tables. They are deleted as soon
as it is certain that no table keeps them. Old commits of the batch's branch still name the metadata of
staging tables. If that branch is discarded later, its sweeper assumes that missing metadata was swept before.

If a scan fails, its tasks do not report their data files. These are found by their names in the tables' data
folders.
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
from branchlake_dagster.history.manifests import read_manifests
from branchlake_dagster.ingest.batch_tables import BatchTargets, EvolutionNeeds
from branchlake_dagster.ingest.declaration import ExpandedIngest
from branchlake_dagster.ingest.formats import Format
from branchlake_dagster.ingest.offsets import Offsets
from branchlake_dagster.ingest.prepared_records import (
    FOR_TABLE,
    INCARNATION,
    PreparedRecords,
    mapped_fields,
    row_columns,
)
from branchlake_dagster.ingest.record_frames import MAX_ARROW_RECORDS
from branchlake_dagster.ingest.worker_writer import SENT_BACK, Work, WorkerTarget, build_writer

_ARROW = "spark.sql.execution.arrow"
_MAX_BYTES = 64 << 20
"""The limit for the bytes that Spark sends to a worker at once. To keep it, Spark adds up all columns after
each record, which took a sixth of a batch's time. So it is only set where records may be large: in a
session's first batch unless their files show that they are small, after a batch with large records, and
after a failed batch. Without it, 2,500 records of a megabyte would exceed the capacity of an Arrow vector."""
_NO_LIMIT = (1 << 31) - 1
_small_record_sessions: WeakSet[SparkSession] = WeakSet()
"""Sessions whose last batch had small records."""
_large_record_sessions: WeakSet[SparkSession] = WeakSet()
"""Sessions whose last batch failed or had large records."""
_byte_limits: WeakKeyDictionary[SparkSession, int] = WeakKeyDictionary()
"""The byte limit that each session has at present."""


@dataclass
class ScanResult:
    """The result of a pass: data files, counts, and the latest times of records.

    `files` has the data files by the target's index in `BatchTargets`; no table contains them yet. The names
    of `counts` are paths, such as `records`, `dead/contract` or `rows/0`. `latest_ms` has the latest time by
    `topic/partition`, in ms since 1970.
    """

    files: dict[int, list[DataFile]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    latest_ms: dict[str, int] = field(default_factory=dict)

    def count_rows(self, target: int) -> int:
        """Return the number of rows that were written for the target with this index."""
        return self.counts[f"rows/{target}"]

    def evolution_needs(self) -> dict[int, EvolutionNeeds]:
        """Return the schema changes that the records need, by the index of the target.

        Targets that need no change are left out.
        """
        names_by_need: dict[int, dict[str, set[str]]] = {}
        for name in self.counts:
            if name.startswith("evolve/"):
                _, target, how, what = name.split("/", 3)
                names_by_need.setdefault(int(target), {}).setdefault(how, set()).add(what)
        return {
            target: EvolutionNeeds(**{how: frozenset(names) for how, names in wanted.items()})
            for target, wanted in names_by_need.items()
        }

    def new_route_names(self, families: Sequence[str]) -> dict[str, set[str]]:
        """Return the route names of records whose tables do not exist yet, by the key of the family.

        `families` are the keys of the families in the order of the ingestion.
        """
        route_names: dict[str, set[str]] = {}
        for count_name in self.counts:
            if count_name.startswith("new/"):
                _, number, name = count_name.split("/", 2)
                route_names.setdefault(families[int(number)], set()).add(name)
        return route_names


def scan_records(
    records: DataFrame,
    ingest: ExpandedIngest,
    record_format: Format,
    targets: BatchTargets,
    min_offsets: Mapping[str, Offsets],
    work: Work,
    *,
    most_bytes: int | None = None,
) -> ScanResult:
    """Convert the records, write them to data files of the targets, and count them. Commits nothing.

    `min_offsets` has the offsets below which each table takes no records. Stored records, which have a column
    of their topic's incarnation, may be from several incarnations of a topic. Records that are read from
    topics are from one incarnation of each. `most_bytes` estimates the largest size of `MAX_ARROW_RECORDS`
    successive records in bytes; None if it is not known.
    """
    session = records.sparkSession
    are_small_records = most_bytes is not None and most_bytes <= _MAX_BYTES
    needs_no_limit = session in _small_record_sessions or (
        are_small_records and session not in _large_record_sessions
    )
    _limit_batch_bytes(session, _NO_LIMIT if needs_no_limit else _MAX_BYTES)
    _small_record_sessions.discard(session)
    _large_record_sessions.add(session)  # until the batch has succeeded
    frame = record_format.read(records)
    stored_topics = (
        list(zip(work.topics, work.incarnations, strict=True)) if INCARNATION in records.columns else []
    )
    prepared = PreparedRecords(
        ingest,
        record_format,
        targets.tables,
        min_offsets,
        min_offsets.get(targets.dead_letters.name),
        stored_topics,
        are_dead_letters=FOR_TABLE in records.columns,
        keeps_records=work.keeps_records,
        kept_offsets=None if targets.kept_records is None else min_offsets.get(targets.kept_records.name),
    )
    frame = prepared.select_columns(frame)
    sent_rows = frame.mapInArrow(build_writer(work), from_arrow_schema(SENT_BACK)).toArrow()
    result = ScanResult()
    for row in sent_rows.to_pylist():
        if row["kind"] == "file":
            # The payload was pickled by this package's code in this batch's workers.
            result.files.setdefault(row["target"], []).append(pickle.loads(row["payload"]))  # noqa: S301
        else:
            counts = json.loads(row["payload"])
            result.counts.update(counts["counts"])
            for name, time_ms in counts["latest"].items():
                result.latest_ms[name] = max(time_ms, result.latest_ms.get(name, time_ms))
    if result.counts["bytes"] * MAX_ARROW_RECORDS < _MAX_BYTES * result.counts["records"]:
        _small_record_sessions.add(session)
        _large_record_sessions.discard(session)
    return result


def _limit_batch_bytes(session: SparkSession, max_bytes: int) -> None:
    """Limit the Arrow batches that the session sends to workers, unless it has that limit already.

    A batch then has at most `max_bytes` bytes, and at most `MAX_ARROW_RECORDS` records.
    """
    if _byte_limits.get(session) != max_bytes:
        session.conf.set(f"{_ARROW}.maxRecordsPerBatch", str(MAX_ARROW_RECORDS))
        session.conf.set(f"{_ARROW}.maxBytesPerBatch", str(max_bytes))
        _byte_limits[session] = max_bytes


def build_worker_targets(
    targets: BatchTargets,
    staged: Mapping[int, tuple[str, Mapping[str, str]]],
    *,
    keeps_records: bool = False,
) -> list[WorkerTarget]:
    """Build the targets for the workers. The kept records are one of them only with `keeps_records`.

    `staged` maps the index of each target whose rows go to a staging table to a pair: the metadata of the
    staging table as JSON, and the columns of that table for attributes of the record, by attribute.
    """
    rows = row_columns(targets.tables)
    table_targets = [
        WorkerTarget(
            staged[number][0] if number in staged else target.table.metadata.model_dump_json(),
            rows[number],
            {
                **(target.declaration.attributes if target.declaration else {}),
                **(
                    {column: attribute for attribute, column in staged[number][1].items()}
                    if number in staged
                    else {}
                ),
            },
            target.name,
            frozenset(mapped_fields(target)),
        )
        for number, target in enumerate(targets.tables)
    ]
    record_targets = [targets.dead_letters]
    if keeps_records and targets.kept_records is not None:
        record_targets.append(targets.kept_records)
    return [
        *table_targets,
        *(
            WorkerTarget(
                staged[number][0] if number in staged else target.table.metadata.model_dump_json(),
                None,
                {},
                target.name,
            )
            for number, target in enumerate(record_targets, len(targets.tables))
        ),
    ]


_MAX_PARALLEL = 8
"""Number of files that are deleted in parallel. Each deletion is a request to the store."""
MAX_LISTED_FILES = 100_000
"""A table with more data files is not searched after a failed scan. One page of a listing has 1,000 files."""
_log = logging.getLogger(__name__)


def delete_files(scanned: ScanResult, targets: BatchTargets, numbers: Collection[int] | None = None) -> None:
    """Delete the data files of a pass, or only those of the targets `numbers`.

    Never raises. A file that cannot be deleted is logged and stays as an orphan file.
    """
    _delete_paths(
        [
            (targets[number].table.io, file.file_path)
            for number, files in scanned.files.items()
            if numbers is None or number in numbers
            for file in files
        ]
    )


def delete_staging_metadata(tables: Iterable[Table]) -> None:
    """Delete metadata files, manifest lists and manifests of staging tables that the branch has dropped.

    Reads one manifest list for each table with rows. Never raises, like `delete_files`.
    """
    files: dict[str, FileIO] = {}
    for table in tables:
        metadata, snapshot = table.metadata, table.current_snapshot()
        paths = [table.metadata_location, *(log_entry.metadata_file for log_entry in metadata.metadata_log)]
        if snapshot is not None:
            paths.append(snapshot.manifest_list)
            try:
                paths += [manifest.manifest_path for manifest in read_manifests(table.io, snapshot)]
            except Exception as error:  # noqa: BLE001 - a store may raise anything; the error is logged
                _log.warning(
                    "The manifests in %s were not deleted, because the list could not be read: %s: %s",
                    snapshot.manifest_list,
                    type(error).__name__,
                    error,
                )
        files |= dict.fromkeys(paths, table.io)
    _delete_paths([(io, path) for path, io in files.items()])


def _delete_paths(files: Sequence[tuple[FileIO, str]]) -> None:
    if not files:
        return
    with ThreadPoolExecutor(min(_MAX_PARALLEL, len(files))) as pool:
        for (_, path), error in zip(files, pool.map(lambda one: _try_delete(*one), files), strict=True):
            if error is not None:
                _log.warning("%s was not deleted: %s: %s", path, type(error).__name__, error)


def _try_delete(io: FileIO, path: str) -> Exception | None:
    try:
        io.delete(path)
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - a store may raise anything; the error is logged
        return error
    return None


@contextlib.contextmanager
def delete_on_failure(
    scanned: ScanResult, targets: BatchTargets, numbers: Collection[int] | None = None
) -> Iterator[None]:
    """Delete the data files of a pass if the block raises, or only those of the targets `numbers`.

    After an OutcomeUnknown they are kept, because a commit may have added them to tables.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, OutcomeUnknown):
            delete_files(scanned, targets, numbers)
        raise


@dataclass
class FailedScans:
    """The failed scans of a batch. Their tasks may have written data files that they did not report."""

    _scans: list[tuple[Work, FileIO]] = field(default_factory=list)

    @contextlib.contextmanager
    def remember_failure(self, work: Work, io: FileIO) -> Iterator[None]:
        """Remember the scan of `work` if it fails. `io` is the FileIO of its tables."""
        try:
            yield
        except Exception:
            self._scans.append((work, io))
            raise

    def delete_files(self) -> None:
        """Delete the files that these scans wrote, with one listing of each table's data folder.

        Three kinds of files stay: those of a table with more than `MAX_LISTED_FILES` data files, which is not
        searched; those that a task writes after its scan has failed; and those that cannot be deleted. Never
        raises.
        """
        paths: dict[str, FileIO] = {}
        folders: dict[str, tuple[FileIO, set[str]]] = {}
        for work, io in self._scans:
            for target in work.targets:
                folder = find_data_folder(TableMetadataUtil.parse_raw(target.metadata_json))
                if folder is None:
                    _log.warning(
                        "The files of a failed scan in %s were not deleted, because the table has"
                        " too many files to search.",
                        target.name,
                    )
                else:
                    folders.setdefault(folder, (io, set()))[1].add(work.file_name_part)
        for folder, (io, parts) in folders.items():
            try:
                paths |= dict.fromkeys(list_named_files(io, folder, parts), io)
            except Exception as error:  # noqa: BLE001 - a store may raise anything; the error is logged
                _log.warning(
                    "The files of a failed scan in %s were not deleted, because the folder could not be"
                    " listed: %s: %s",
                    folder,
                    type(error).__name__,
                    error,
                )
        _delete_paths([(io, path) for path, io in paths.items()])
        self._scans.clear()


def find_data_folder(metadata: TableMetadata) -> str | None:
    """Return the location of a table's data folder; None for more than `MAX_LISTED_FILES` data files.

    The number of data files is read from the summary of the current snapshot. It counts as 0 if the summary
    does not have it.
    """
    snapshot = metadata.current_snapshot()
    summary = snapshot.summary if snapshot is not None else None
    count = summary.additional_properties.get("total-data-files", "0") if summary is not None else "0"
    if int(count) > MAX_LISTED_FILES:
        return None
    return load_location_provider(metadata.location, metadata.properties).data_path


def list_named_files(io: FileIO, folder: str, parts: Collection[str]) -> list[str]:
    """Return the locations of all files below a folder whose name contains one of `parts`.

    Returns [] for an `io` that is not PyArrow's, because it cannot list files.
    """
    if not isinstance(io, PyArrowFileIO):
        return []
    scheme, netloc, root = io.parse_location(folder, io.properties)
    everything = FileSelector(root, recursive=True, allow_not_found=True)
    return [
        folder + info.path[len(root) :]
        for info in io.fs_by_scheme(scheme, netloc).get_file_info(everything)
        if info.is_file and any(part in info.base_name for part in parts)
    ]
