"""The sink that writes a topic's files; the only writer of its partition."""

from __future__ import annotations

import contextlib
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

from branchlake_dagster.embedded.logs import earlier_log, rotate_by_rename
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
    """Files of one partition of a topic, each written whole, synced, and given its name last.

    Args:
        folder: the landing folder; made if it is not there.
        topic: the topic's name.
        partition: the partition's number.
        origin: what the headers say of the receiver.
        roll: when a file is finished.
        now_ns: the wall clock, nanoseconds since 1970.

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
        """Where the files lie."""
        return self.landing.partition_folder(self.topic, self.partition)

    @property
    def next_offset(self) -> int:
        """The offset of the next record."""
        return self._next_offset

    def open(self, *, resume: bool) -> ResumeState:
        """Lock the partition, remove what a crash left unfinished, and continue its offsets.

        Raises:
            PartitionTaken: another receiver has it.
            LandingDamaged: files that were there are gone, so offsets would be given twice.

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

        Raises:
            NotHandedOver: nothing of it is there; the disk is full, for one.
            NotConfirmed: it is there, and may not survive a loss of power.

        """
        first, last = self._next_offset, self._next_offset + len(records) - 1
        name = file_name(first, last)
        unfinished = self.folder / f".{name}{UNFINISHED_SUFFIX}"
        try:
            with unfinished.open("wb") as file:
                pq.write_table(self.as_table(records, first), file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(self.folder / name)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise NotHandedOver(
                f"{len(records)} records could not be written to {self.folder / name}: {error}.",
                records,
                hint="Make room on the disk, or see to its permissions; it is tried again.",
            ) from error
        self._next_offset = last + 1
        try:
            sync_folder(self.folder)
            self._write_mark()
        except OSError as error:
            raise NotConfirmed(
                f"{len(records)} records are in {self.folder / name}, but the disk does not say that they"
                f" will stay there: {error}.",
                records,
            ) from error
        self._append_log_line(
            first=first,
            last=last,
            rows=len(records),
            size_bytes=(self.folder / name).stat().st_size,
            opened=_format_time(records[0].received_ns),
            dropped_so_far=dropped,
        )

    def stop_waiting(self) -> None:
        """A file is written without waiting for anybody."""

    def close(self) -> None:
        """Unlock the partition."""
        for descriptor in (self._mark_descriptor, self._lock_descriptor):
            if descriptor is not None:
                os.close(descriptor)
        self._mark_descriptor = self._lock_descriptor = None

    def as_table(self, records: Sequence[Record], first: int) -> pa.Table:
        """The rows of `records`, the first of which has the offset `first`."""
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
        # One column after the other, then taken row by row; a header without a value is left out.
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
        """Make a file in memory: PyArrow imports Pandas for its first one, a second of CPU.

        On a machine that was taken that second was most of what an end may take.
        """
        record = Record(b"", b"", 0, b"", None)
        pq.write_table(self.as_table([record], 0), pa.BufferOutputStream(), compression="zstd")

    def _take_lock(self) -> None:
        descriptor = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not try_file_lock(descriptor):
            os.close(descriptor)
            raise PartitionTaken(
                f"Partition {self.partition} of topic {self.topic} in {self.landing.folder} has a receiver"
                f" already.",
                hint="End that one, or take another partition.",
                subject=f"{self.topic}[{self.partition}]",
            )
        self._lock_descriptor = descriptor

    def _read_mark(self) -> int:
        """The offset that the partition's mark names; 0 if it has none, as folders of older releases."""
        path = self.folder / NEXT_OFFSET_FILE
        try:
            return int(path.read_bytes())
        except FileNotFoundError:
            return 0
        except ValueError as error:
            raise LandingDamaged(
                f"{path} is not an offset.",
                hint="If no newest file of the partition is missing, remove it: it is made again.",
                reason="mark_unreadable",
                subject=f"{self.topic}[{self.partition}]",
            ) from error

    def _read_logged_offset(self) -> int:
        """The offset after the partition's last file in the log's end, where other partitions write too."""
        next_offset = 0
        log = self.landing.topic_folder(self.topic) / LOG_FILE
        for entry in (*_read_last_entries(earlier_log(log)), *_read_last_entries(log)):
            if entry.get("partition") == self.partition:
                next_offset = max(
                    next_offset, int(entry.get("last", -1)) + 1, int(entry.get("next_offset", 0))
                )
        return next_offset

    def _require_unused(self, recorded_offset: int, source: str) -> None:
        """Raise LandingDamaged where offsets would be given a second time."""
        if recorded_offset > self._next_offset:
            raise LandingDamaged(
                f"Partition {self.partition} of topic {self.topic} in {self.landing.folder} ends before"
                f" offset {self._next_offset}, but {source} says {recorded_offset}: its newest files are"
                " gone.",
                hint="Restore them, or remove the topic's folder: another incarnation begins anew.",
            )

    def _open_mark(self) -> None:
        self._mark_descriptor = os.open(
            self.folder / NEXT_OFFSET_FILE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
        self._write_mark()
        sync_folder(self.folder)

    def _write_mark(self) -> None:
        """Make the next offset durable. After the files before it, so a crash never leaves it too high."""
        assert self._mark_descriptor is not None  # noqa: S101 - the sink is open
        os.pwrite(self._mark_descriptor, b"%020d\n" % self._next_offset, 0)
        os.fdatasync(self._mark_descriptor)

    def _append_log_line(self, **fields: Any) -> None:
        """Add a line. One write in append mode: lines of several partitions do not mix."""
        entry = {
            "partition": self.partition,
            "receiver": self.origin.receiver,
            "closed": _format_time(self._now_ns()),
            **fields,
        }
        path = self.landing.topic_folder(self.topic) / LOG_FILE
        rotate_by_rename(path)
        # The files are the truth: a report may lack a line, when the disk is full for one.
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, json.dumps(entry).encode() + b"\n")
            finally:
                os.close(descriptor)

    def _read_resume_state(self) -> ResumeState:
        """The last cursor of this receiver, and its last values."""
        cursor: bytes | None = None
        value_digests: list[bytes] = []
        for file in reversed(self.landing.files(self.topic, self.partition)):
            table = pq.read_table(file.path, columns=["value", "headers"])
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
    """The last lines of a log that can be read."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_TAIL))
        log_tail = file.read().decode(errors="replace")
    entries = []
    for line in log_tail.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # the first may be cut, and the last one of a crash
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def _format_time(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).isoformat(timespec="microseconds")
