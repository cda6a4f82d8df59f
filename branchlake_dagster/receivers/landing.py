"""The landing folder: topics as folders of files, and their offsets.

::

    <landing>/<topic>/topic-id                                     the incarnation, a UUID that never changes
    <landing>/<topic>/ingest.log                                   the report: a JSON line for each file
    <landing>/<topic>/<partition>/<first offset>-<last offset>.parquet
    <landing>/<topic>/<partition>/next-offset                      offsets below it are never used again

Offsets of a partition's files are contiguous, so the listing alone shows which offsets exist. A file has the
columns of a Kafka record in Spark (`LANDING_SCHEMA`) and appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pyarrow as pa

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal

LANDING_SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
"""Columns of a file, as in Spark's Kafka source. ``timestamp`` is the time of receipt."""

TOPIC_ID_FILE, LOG_FILE, LOCK_FILE, UNFINISHED_SUFFIX = "topic-id", "ingest.log", ".lock", ".tmp"
NEXT_OFFSET_FILE = "next-offset"
"""The file in a partition's folder with the offset after its newest file, in 20 digits.

It reveals that the newest file was lost.
"""
_LISTINGS = 3
_DIGITS = 20
_MAX_OFFSET = (1 << 63) - 1
_FILE = re.compile(rf"(\d{{{_DIGITS}}})-(\d{{{_DIGITS}}})\.parquet", re.ASCII)
_TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")


class LandingDamaged(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """Files of a landing folder are missing, overlap, or contradict the offsets that its log records."""


class OffsetsGone(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The files of the requested offsets were removed, or do not exist yet."""


@dataclass(frozen=True)
class LandingFile:
    """A file of a partition, with its first and last offset (both inclusive)."""

    path: Path
    topic: str
    partition: int
    first: int
    last: int

    @property
    def rows(self) -> int:
        """The number of records in the file."""
        return self.last - self.first + 1


class Landing:
    """Access to the topics of a landing folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def topics(self) -> list[str]:
        """Return the sorted names of the topics that have an id."""
        if not self.folder.is_dir():
            return []
        # Unlike `Path.is_file`, this is false in a folder that cannot be read, such as lost+found.
        return sorted(
            path.name
            for path in self.folder.iterdir()
            if os.path.isfile(path / TOPIC_ID_FILE)  # noqa: PTH113
        )

    def topic_id(self, topic: str) -> str:
        """Return the topic's incarnation: a UUID that a new folder of the same name would not have.

        Raises:
            ConfigurationError: The folder does not have the topic.
            LandingDamaged: The file does not contain a UUID.

        """
        path = self.topic_folder(topic) / TOPIC_ID_FILE
        try:
            return str(uuid.UUID(path.read_text().strip()))
        except FileNotFoundError:
            raise ConfigurationError(
                f"Landing folder {self.folder} has no topic {topic}.",
                hint=f"Its topics are: {', '.join(self.topics()) or 'none'}.",
                reason="unknown_topic",
                subject=topic,
            ) from None
        except ValueError as error:
            raise LandingDamaged(
                f"{path} does not contain a UUID.",
                hint="Restore it from a backup.",
                reason="topic_id_unreadable",
                subject=topic,
            ) from error

    def make_topic(self, topic: str) -> str:
        """Return the topic's id. Create the topic's folder and id if they do not exist."""
        folder = self.topic_folder(topic)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished_path = folder / f".{uuid.uuid4()}{UNFINISHED_SUFFIX}"
        try:
            with unfinished_path.open("w") as file:
                file.write(f"{uuid.uuid4()}\n")
                file.flush()
                os.fsync(file.fileno())
            # A link fails if the name exists, so of two receivers only one creates the id.
            with contextlib.suppress(FileExistsError):
                (folder / TOPIC_ID_FILE).hardlink_to(unfinished_path)
        finally:
            unfinished_path.unlink(missing_ok=True)
        sync_folder(folder)
        sync_folder(self.folder)
        return self.topic_id(topic)

    def topic_folder(self, topic: str) -> Path:
        """Return the folder of a topic. Raises ConfigurationError for a name that Kafka would not accept."""
        if not _TOPIC.fullmatch(topic):
            raise ConfigurationError(
                f"{topic!r} is not a valid name of a topic.",
                hint="Use up to 249 letters, digits, dots, underscores and hyphens.",
                reason="topic_name",
                subject=topic,
            )
        return self.folder / topic

    def partition_folder(self, topic: str, partition: int) -> Path:
        """Return the folder of a partition, whether it exists or not.

        Raises ConfigurationError for a topic's name that Kafka would not accept.
        """
        return self.topic_folder(topic) / str(partition)

    def partitions(self, topic: str) -> list[int]:
        """Return the numbers of the existing partitions, in order. Raises the errors of `topic_id`."""
        self.topic_id(topic)
        names = (path.name for path in self.topic_folder(topic).iterdir() if path.is_dir())
        return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))

    def files(self, topic: str, partition: int) -> list[LandingFile]:
        """Return the finished files of a partition, ordered by offset.

        Raises:
            LandingDamaged: Files overlap, there is a gap between two of them, or a name is impossible.

        """
        return [self._landing_file(topic, partition, span) for span in self._spans(topic, partition)]

    def offsets(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the first existing offset and the next offset; (0, 0) if there are no files.

        Raises LandingDamaged as `files` does.
        """
        spans = self._spans(topic, partition)
        return (spans[0][0], spans[-1][1] + 1) if spans else (0, 0)

    def files_with_offsets(self, topic: str, partition: int, start: int, end: int) -> list[LandingFile]:
        """Return the files that have the offsets from `start` to before `end`, in order.

        The first and the last file may have more offsets.

        Raises:
            OffsetsGone: Some of these offsets do not exist.
            LandingDamaged: Files overlap, or there is a gap between two of them.
        """
        if start >= end:
            return []
        spans = self._spans(topic, partition)
        available = (spans[0][0], spans[-1][1] + 1) if spans else (0, 0)
        if start < available[0] or end > available[1]:
            raise OffsetsGone(
                f"Partition {partition} of topic {topic} in {self.folder} has the offsets {available[0]} to"
                f" before {available[1]}, but {start} to before {end} were requested.",
                hint="Files were removed too early, or the topic was created again (compare its topic-id).",
                subject=f"{topic}[{partition}]",
            )
        wanted = [span for span in spans if span[1] >= start and span[0] < end]
        return [self._landing_file(topic, partition, span) for span in wanted]

    def _landing_file(self, topic: str, partition: int, span: tuple[int, int]) -> LandingFile:
        path = self.partition_folder(topic, partition) / file_name(*span)
        return LandingFile(path, topic, partition, *span)

    def _spans(self, topic: str, partition: int) -> list[tuple[int, int]]:
        """Return the first and the last offset of each finished file of a partition, in order of offsets.

        Returns [] if the partition has no folder. Raises LandingDamaged as `files` does, if several listings
        in a row show a gap or an overlap.
        """
        for _ in range(_LISTINGS - 1):
            # A listing is not atomic: files that appear or disappear meanwhile can look like a gap.
            with contextlib.suppress(LandingDamaged):
                return self._list_spans(topic, partition)
        return self._list_spans(topic, partition)

    def _list_spans(self, topic: str, partition: int) -> list[tuple[int, int]]:
        folder = self.partition_folder(topic, partition)
        if not folder.is_dir():
            return []
        # Read only names: a day can have 86,400 files, and each batch lists them.
        names = os.listdir(folder)  # noqa: PTH208
        spans = sorted((int(match[1]), int(match[2])) for match in map(_FILE.fullmatch, names) if match)
        for span in spans:
            if span[0] > span[1] or span[1] >= _MAX_OFFSET:
                raise LandingDamaged(
                    f"{folder / file_name(*span)} is not the name of a file of a receiver.",
                    hint="Restore the file's name, or move it out of the folder.",
                    reason="file_name",
                    subject=f"{topic}[{partition}]",
                )
        for earlier, later in pairwise(spans):
            where = f"Partition {partition} of topic {topic} in {self.folder} is damaged"
            if later[0] > earlier[1] + 1:
                gap = (earlier[1] + 1, later[0] - 1)
                raise LandingDamaged(
                    f"{where}: the offsets {gap[0]} to {gap[1]} are missing. They were in the file"
                    f" {file_name(*gap)}, or in several files.",
                    hint="Restore them from a backup. Until then nothing of the topic is read. If they are"
                    " lost, docs/operations.md has the steps to continue without them under LandingDamaged.",
                    reason="offsets_missing",
                    subject=f"{topic}[{partition}]",
                )
            if later[0] <= earlier[1]:
                raise LandingDamaged(
                    f"{where}: {file_name(*earlier)} and {file_name(*later)} both have the offset"
                    f" {later[0]}.",
                    hint="Remove the file that no receiver has written, such as a copy.",
                    reason="offsets_twice",
                    subject=f"{topic}[{partition}]",
                )
        return spans

    def remove_before(self, topic: str, partition: int, offset: int) -> list[LandingFile]:
        """Remove the files whose offsets are all below `offset`. Return the removed files.

        The newest file always stays, because the next receiver continues from its offsets.
        """
        removed = [file for file in self.files(topic, partition)[:-1] if file.last < offset]
        # Start with the oldest file, so that an interruption leaves no gap. Another removal may be as far.
        for file in removed:
            file.path.unlink(missing_ok=True)
        return removed


@contextlib.contextmanager
def requiring_whole_file(file: LandingFile) -> Iterator[None]:
    """Raise LandingDamaged if the file turns out to be empty, cut short, of another kind, or a folder.

    Other errors of the operating system, and a lack of memory, pass through: they do not concern the file's
    content.
    """
    try:
        yield
    except (MemoryError, pa.ArrowCancelled):
        raise
    except (pa.ArrowException, OSError, LookupError, UnicodeDecodeError) as error:
        # PyArrow raises some FileNotFoundErrors without the number of the error.
        is_missing = isinstance(error, FileNotFoundError)
        is_of_system = is_missing or (isinstance(error, OSError) and error.errno is not None)
        if is_of_system and not isinstance(error, IsADirectoryError):
            raise
        raise LandingDamaged(
            f"{file.path} is not a complete file of records: {error}",
            hint="Restore the file from a backup.",
            reason="file_unreadable",
            subject=str(file.path),
        ) from error


def file_name(first: int, last: int) -> str:
    """Return the name of the file with these first and last offsets, each in 20 digits."""
    return f"{first:0{_DIGITS}}-{last:0{_DIGITS}}.parquet"


def sync_folder(folder: Path) -> None:
    """Make the names of the files in a folder durable, so that they survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
