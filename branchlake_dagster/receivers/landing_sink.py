"""The landing sink: it writes the files of a topic, as the only writer of its partition."""

from __future__ import annotations

import contextlib
import errno
import filecmp
import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from branchlake_dagster.embedded.process import earlier_log, rotate_by_rename
from branchlake_dagster.file_lock import try_file_lock
from branchlake_dagster.receivers.landing import (
    LANDING_SCHEMA,
    LOCK_FILE,
    LOG_FILE,
    NEXT_OFFSET_FILE,
    UNFINISHED_SUFFIX,
    Landing,
    LandingDamaged,
    file_name,
    requiring_whole_file,
    sync_folder,
)
from branchlake_dagster.receivers.records import (
    CURSOR_HEADER,
    PROTOCOL_HEADER,
    RECEIVED_NS_HEADER,
    RECEIVER_HEADER,
    SOURCE_HEADER,
    NotConfirmed,
    NotHandedOver,
    PartitionTaken,
    ReceiverOrigin,
    Record,
    ResumeState,
    Roll,
    digest_value,
)

DEFAULT_ROLL = Roll(records=50_000, size_bytes=64 * 1024 * 1024, age_s=1.0)
_LOG_TAIL = 256 * 1024
_REMEMBERED_VALUES = 50_000


class LandingSink:
    """Writes the files of one partition of a topic. A file appears only after it is complete and synced.

    Args:
        folder: The landing folder. It is created if it does not exist.
        topic: The name of the topic.
        partition: The number of the partition.
        origin: The receiver, as written to the headers.
        roll: The number, size and age of records at which a file is finished.
        now_ns: The wall clock, in nanoseconds since 1970.

    """

    def __init__(
        self,
        folder: Path,
        topic: str,
        partition: int,
        origin: ReceiverOrigin,
        *,
        roll: Roll = DEFAULT_ROLL,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.landing, self.topic, self.partition, self.origin = Landing(folder), topic, partition, origin
        self.roll = roll
        self._now_ns = now_ns
        self._lock_descriptor: int | None = None
        self._mark_descriptor: int | None = None
        self._next_offset = 0

    @property
    def folder(self) -> Path:
        """The folder of the partition."""
        return self.landing.partition_folder(self.topic, self.partition)

    @property
    def next_offset(self) -> int:
        """The offset of the next record."""
        return self._next_offset

    def open(self, *, resume: bool) -> ResumeState:
        """Lock the partition, remove unfinished files of a crash, and continue the offsets.

        With ``resume`` returns the state of this receiver's stored records, else an empty state.

        Raises:
            PartitionTaken: Another receiver writes to the partition.
            LandingDamaged: The newest files are gone, so their offsets would be used twice; or a file that
                is needed to resume cannot be read.
        """
        self.landing.make_topic(self.topic)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        try:
            for unfinished in self.folder.glob(f"*{UNFINISHED_SUFFIX}"):
                unfinished.unlink()
            _, self._next_offset = self.landing.offsets(self.topic, self.partition)
            self._require_unused(self._read_mark(), "its high-water mark")
            self._require_unused(self._read_logged_offset(), "its log")
            self._open_mark()
            self._warm_up_parquet()
            self._append_log_line(event="opened", next_offset=self._next_offset)
            return self._read_resume_state() if resume else ResumeState()
        except BaseException:
            self.close()
            raise

    def write(self, records: Sequence[Record], dropped: int = 0) -> None:
        """Write one file. Its records are durable when this returns.

        `dropped` is the number of records that the receiver has dropped so far; it is logged with the file.

        Raises:
            NotHandedOver: Nothing was written, for example because the disk is full, or because the folder
                is no longer the one that the sink has locked.
            NotConfirmed: The file was written, but may not survive a power cut.
        """
        first, last = self._next_offset, self._next_offset + len(records) - 1
        name = file_name(first, last)
        unfinished = self.folder / f".{name}{UNFINISHED_SUFFIX}"
        try:
            self._require_locked_folder(records)
            # If its removal failed, it may be the same file as a finished one.
            unfinished.unlink(missing_ok=True)
            with unfinished.open("xb") as file:
                # Without checksums, a reader may take damaged bytes for values: zstd stores what it cannot
                # compress as it is.
                table = self.as_table(records, first)
                pq.write_table(
                    table,
                    file,
                    compression="zstd",
                    use_dictionary=_REPEATED_COLUMNS,
                    write_page_checksum=True,
                )
                file.flush()
                os.fsync(file.fileno())
                size_bytes = os.fstat(file.fileno()).st_size
            _link_new(unfinished, self.folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise NotHandedOver(
                f"{len(records)} records could not be written to {self.folder / name}: {error}.",
                records,
                hint=f"{_write_hint(error)} The receiver tries again.",
            ) from error
        self._next_offset = last + 1
        with contextlib.suppress(OSError):  # the next start of a receiver removes it
            unfinished.unlink(missing_ok=True)
        try:
            sync_folder(self.folder)
            self._write_mark()
        except OSError as error:
            raise NotConfirmed(
                f"{len(records)} records were written to {self.folder / name}, but they may not survive a"
                f" power cut: {error}.",
                records,
            ) from error
        self._append_log_line(
            first=first,
            last=last,
            rows=len(records),
            size_bytes=size_bytes,
            opened=_format_time(records[0].received_ns),
            dropped_so_far=dropped,
        )

    def stop_waiting(self) -> None:
        """Do nothing: writing a file waits for no other process."""

    def close(self) -> None:
        """Close the files and unlock the partition."""
        for descriptor in (self._mark_descriptor, self._lock_descriptor):
            if descriptor is not None:
                os.close(descriptor)
        self._mark_descriptor = self._lock_descriptor = None

    def as_table(self, records: Sequence[Record], first: int) -> pa.Table:
        """Convert records to the rows of a file. The first record gets the offset `first`."""
        rows = len(records)
        values, keys, received, sources, cursors = zip(*records, strict=True)
        received_ns = np.array(received, dtype=np.int64)
        columns = {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "topic": pa.repeat(pa.scalar(self.topic), rows),
            "partition": pa.repeat(pa.scalar(self.partition, pa.int32()), rows),
            "offset": pa.array(np.arange(first, first + rows)),
            "timestamp": pa.array(received_ns // 1000).cast(pa.timestamp("us", "UTC")),
            "headers": self._build_headers(received_ns, sources, cursors),
        }
        return pa.table(columns, schema=LANDING_SCHEMA)

    def _build_headers(
        self, received_ns: Any, sources: Sequence[bytes], cursors: Sequence[bytes | None]
    ) -> pa.Array:
        rows = len(received_ns)
        receipt = pa.array(received_ns).cast(pa.string()).cast(pa.binary())
        header_columns = [
            (RECEIVER_HEADER, pa.repeat(pa.scalar(self.origin.receiver.encode()), rows)),
            (PROTOCOL_HEADER, pa.repeat(pa.scalar(self.origin.protocol.encode()), rows)),
            (RECEIVED_NS_HEADER, receipt),
            (SOURCE_HEADER, pa.array(sources, pa.binary())),
            (CURSOR_HEADER, pa.array(cursors, pa.binary())),
        ]
        # Concatenate the columns, then take their values row by row. A header without a value is left out.
        names = pa.concat_arrays([pa.repeat(pa.scalar(name), rows) for name, _ in header_columns])
        contents = pa.concat_arrays([values for _, values in header_columns])
        order = np.arange(len(header_columns) * rows).reshape(len(header_columns), rows).T
        has_value = np.ones(order.shape, dtype=bool)
        has_value[:, -1] = header_columns[-1][1].is_valid().to_numpy(zero_copy_only=False)
        value_order = pa.array(order[has_value])
        ends = np.concatenate([[0], np.cumsum(has_value.sum(axis=1))]).astype(np.int32)
        pairs = pa.StructArray.from_arrays(
            [names.take(value_order), contents.take(value_order)], ["key", "value"]
        )
        return pa.ListArray.from_arrays(pa.array(ends), pairs)

    def _warm_up_parquet(self) -> None:
        """Write a small file to memory when the sink opens.

        For its first file, PyArrow imports Pandas, which takes a second of CPU time. Otherwise a receiver
        that is stopped before its first file would need that second of the five in which it must end.
        """
        record = Record(b"", b"", 0, b"", None)
        pq.write_table(self.as_table([record], 0), pa.BufferOutputStream(), compression="zstd")

    def _take_lock(self) -> None:
        descriptor = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not try_file_lock(descriptor):
            os.close(descriptor)
            raise PartitionTaken(
                f"Another receiver writes to partition {self.partition} of topic {self.topic} in"
                f" {self.landing.folder}.",
                hint="Stop that receiver, or use another partition.",
                subject=f"{self.topic}[{self.partition}]",
            )
        self._lock_descriptor = descriptor

    def _require_locked_folder(self, records: Sequence[Record]) -> None:
        """Raise NotHandedOver if the partition's folder was removed or replaced since the sink was opened.

        The lock stays with the former folder, so another receiver may write to the new one.
        """
        assert self._lock_descriptor is not None  # noqa: S101 - the sink is open
        is_locked = _is_open_file(self._lock_descriptor, self.folder / LOCK_FILE)
        if is_locked is None and self._mark_descriptor is not None:
            # A cleaning job may have removed only the lock file, which looks old.
            is_locked = _is_open_file(self._mark_descriptor, self.folder / NEXT_OFFSET_FILE)
        if not is_locked:
            raise NotHandedOver(
                f"{len(records)} records could not be written to {self.folder}: the folder or its file"
                f" {LOCK_FILE} was removed or replaced since this receiver opened it.",
                records,
                hint="Put the former folder back, and the receiver continues. Or restart the receiver: then"
                " it writes to the folder that is there.",
            )

    def _read_mark(self) -> int:
        """Read the next offset from the partition's mark; 0 if an older release wrote the folder."""
        path = self.folder / NEXT_OFFSET_FILE
        try:
            return int(path.read_bytes())
        except FileNotFoundError:
            return 0
        except ValueError as error:
            raise LandingDamaged(
                f"{path} does not contain an offset.",
                hint="If the newest files of the partition exist, remove this file. It is created again.",
                reason="mark_unreadable",
                subject=f"{self.topic}[{self.partition}]",
            ) from error

    def _read_logged_offset(self) -> int:
        """Read the next offset of this partition from the end of the topic's log; 0 if it is not there.

        All partitions of the topic share the log.
        """
        next_offset = 0
        log = self.landing.topic_folder(self.topic) / LOG_FILE
        for entry in (*_read_last_entries(earlier_log(log)), *_read_last_entries(log)):
            if entry.get("partition") == self.partition:
                next_offset = max(
                    next_offset, int(entry.get("last", -1)) + 1, int(entry.get("next_offset", 0))
                )
        return next_offset

    def _require_unused(self, recorded_offset: int, source: str) -> None:
        """Raise LandingDamaged if the files end before `recorded_offset`: offsets would be used again.

        `recorded_offset` is the partition's next offset according to `source`, the name of another record.
        """
        if recorded_offset > self._next_offset:
            raise LandingDamaged(
                f"Partition {self.partition} of topic {self.topic} in {self.landing.folder} ends before"
                f" offset {self._next_offset}, but {source} has offset {recorded_offset}: its newest files"
                " are gone.",
                hint="Restore the files, or remove the topic's folder: then a new incarnation begins.",
                reason="newest_files_missing",
                subject=f"{self.topic}[{self.partition}]",
            )

    def _open_mark(self) -> None:
        self._mark_descriptor = os.open(
            self.folder / NEXT_OFFSET_FILE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
        self._write_mark()
        sync_folder(self.folder)

    def _write_mark(self) -> None:
        """Make the next offset durable, after its file, so that a crash never leaves it too high."""
        assert self._mark_descriptor is not None  # noqa: S101 - the sink is open
        os.pwrite(self._mark_descriptor, b"%020d\n" % self._next_offset, 0)
        os.fdatasync(self._mark_descriptor)

    def _append_log_line(self, **fields: Any) -> None:
        """Append a line to the log. It is a single write, so that lines of several partitions do not mix."""
        entry = {
            "partition": self.partition,
            "receiver": self.origin.receiver,
            "closed": _format_time(self._now_ns()),
            **fields,
        }
        path = self.landing.topic_folder(self.topic) / LOG_FILE
        rotate_by_rename(path)
        # The files are the truth. The log may lack a line, for example if the disk is full.
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, json.dumps(entry).encode() + b"\n")
            finally:
                os.close(descriptor)

    def _read_resume_state(self) -> ResumeState:
        """Read this receiver's last cursor and the digests of its last values from its newest files."""
        cursor: bytes | None = None
        value_digests: list[bytes] = []
        for file in reversed(self.landing.files(self.topic, self.partition)):
            with requiring_whole_file(file):
                table = pq.read_table(
                    file.path,
                    columns=["value", "headers"],
                    partitioning=None,
                    page_checksum_verification=True,
                )
            for value, pairs in zip(
                reversed(table["value"].to_pylist()), reversed(table["headers"].to_pylist()), strict=True
            ):
                headers = {pair["key"]: pair["value"] for pair in pairs}
                if headers.get(RECEIVER_HEADER) == self.origin.receiver.encode():
                    cursor = cursor if cursor is not None else headers.get(CURSOR_HEADER)
                    value_digests.append(digest_value(value))
            if cursor is not None and len(value_digests) >= _REMEMBERED_VALUES:
                break
        return ResumeState(cursor, tuple(reversed(value_digests)))


def _read_last_entries(path: Path) -> list[dict[str, Any]]:
    """Return the entries in the last 256 KiB of a log, oldest first; [] if the log does not exist.

    Lines that cannot be parsed are left out.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_TAIL))
        log_tail = file.read().decode(errors="replace")
    entries = []
    for line in log_tail.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # the first line may be cut, and the last one after a crash
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def _format_time(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).isoformat(timespec="microseconds")


_REPEATED_COLUMNS = ["key", "topic", "partition", "headers.list.element.key", "headers.list.element.value"]
"""The columns with a dictionary. Without one for values, the footer shows their size."""


def _link_new(unfinished: Path, path: Path) -> None:
    """Give a finished file its name as a second name. Raises FileExistsError if another file has it.

    Unlike a rename, a link never replaces a file. A network file system may report an error, or that the
    name exists, after it has made the link.
    """
    try:
        path.hardlink_to(unfinished)
    except OSError:
        with contextlib.suppress(OSError):
            if filecmp.cmp(unfinished, path, shallow=False):
                return
        raise


def _write_hint(error: OSError) -> str:
    if isinstance(error, FileExistsError):
        return "Another process has put a file of this name there. Move it to another folder."
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return "Free space on the disk."
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return "Correct the permissions of the folder."
    return "Check the folder and its disk."


def _is_open_file(descriptor: int, path: Path) -> bool | None:
    """Whether the file at `path` is the open one; None if there is no such file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return None
