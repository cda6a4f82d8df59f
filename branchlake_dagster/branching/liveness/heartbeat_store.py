"""Heartbeat files: `<warehouse>/_branchlake/heartbeats/<branch>/<writer>.json`, one per writing process."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import quote, unquote

import pyarrow as pa
from pyarrow.fs import FileInfo, FileSelector, FileType, LocalFileSystem
from pyiceberg.io.pyarrow import PyArrowFileIO

from branchlake_dagster.errors import BranchlakeError, Transient
from branchlake_dagster.settings import Settings

FOLDER = "_branchlake/heartbeats"
MISSED = 3
"""So many intervals of silence make a writer suspect, and as many under watch make it dead."""

Kind = Literal["run", "publisher", "unknown"]
"""Who beats; `unknown` stands for a file that does not tell, which counts as both."""

LONGEST_S = 3600.0
"""The longest interval that is believed."""
_MOST = 64 * 1024
_READERS = 8


class HeartbeatsUnreadable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """The folder of heartbeats cannot be read, so nobody can say which writers are alive."""


def new_writer() -> str:
    """A name for a writing process that no other one has."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True)
class Heartbeat:
    """What one writer said last. `counter` grows with each beat; `written_at` is the writer's own clock."""

    branch: str
    writer: str
    run_id: str
    kind: Kind = "run"
    counter: int = 0
    written_at: datetime | None = None
    interval_s: float = 10.0
    pid: int = 0
    host: str = ""
    instance: str = ""
    """The Dagster instance of the run; empty: it is not told."""
    text: str = field(default="", repr=False)
    """The file as it was read; two readings that differ prove that somebody wrote in between."""

    @property
    def silent_s(self) -> float:
        """The silence in seconds that makes the writer suspect."""
        return MISSED * self.interval_s


class HeartbeatStore:
    """Reads and writes heartbeat files in the warehouse, with a file system client of its own.

    `properties` are PyIceberg's for FileIO. Safe to share between threads.
    """

    def __init__(self, warehouse: str, properties: Mapping[str, str] | None = None) -> None:
        io = PyArrowFileIO(dict(properties or {}))
        scheme, netloc, path = io.parse_location(f"{warehouse.rstrip('/')}/{FOLDER}", io.properties)
        self._files: Any = io.fs_by_scheme(scheme, netloc)
        self.root = path

    @classmethod
    def of(cls, settings: Settings) -> HeartbeatStore:
        """The store of a lake."""
        return cls(settings.warehouse_uri, settings.file_io_properties())

    def _path(self, branch: str, writer: str) -> str:
        return f"{self.root}/{quote(branch, safe='')}/{writer}.json"

    def write(self, beat: Heartbeat) -> None:
        """Replace the writer's file. Raises OSError."""
        path = self._path(beat.branch, beat.writer)
        told = {k: v for k, v in asdict(beat).items() if k != "text"}
        told["written_at"] = beat.written_at.isoformat() if beat.written_at else None
        # An object store shows an object whole or not at all; a local file needs the rename for that.
        local = isinstance(self._files, LocalFileSystem)
        target = f"{path}.{beat.counter}.tmp" if local else path
        with self._files.open_output_stream(target) as stream:
            stream.write(json.dumps(told).encode())
        if local:
            self._files.move(target, path)

    def remove(self, branch: str, writer: str) -> None:
        """Forget a writer. One that is gone already is fine."""
        path = self._path(branch, writer)
        with contextlib.suppress(FileNotFoundError):
            self._files.delete_file(path)
        if isinstance(self._files, LocalFileSystem):
            folder = Path(path).parent
            for unfinished in folder.glob(
                f"{writer}.json.*.tmp"
            ):  # of a process killed in the middle of a beat
                unfinished.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another process beats there; S3 has no folders
                folder.rmdir()

    def all(self) -> tuple[Heartbeat, ...]:
        """The last beat of every writer; raises HeartbeatsUnreadable when they cannot be listed.

        A file that is damaged or cannot be read concerns its own branch only.
        """
        try:
            infos = self._listed()
            paths = [i.path for i in infos if i.type is FileType.File and i.path.endswith(".json")]
            with ThreadPoolExecutor(_READERS) as pool:
                return tuple(beat for beat in pool.map(self._read, paths) if beat is not None)
        except (OSError, pa.ArrowException) as error:
            raise HeartbeatsUnreadable(
                f"The heartbeats in {self.root} cannot be read: {type(error).__name__}.",
                hint="Nobody can say which writers are alive; nothing is cleaned up until they can be read.",
            ) from error

    def _listed(self) -> list[FileInfo]:
        everything = FileSelector(self.root, recursive=True, allow_not_found=True)
        try:
            return cast(list[FileInfo], self._files.get_file_info(everything))
        except FileNotFoundError:
            # PyArrow lists, then asks whether the folder exists: one that the first writer makes between
            # the two is "not found" although `allow_not_found` says that nothing is wrong. It is there now.
            return cast(list[FileInfo], self._files.get_file_info(everything))

    def _read(self, path: str) -> Heartbeat | None:
        try:
            with self._files.open_input_stream(path) as stream:
                text = stream.read(_MOST).decode(errors="replace")
        except FileNotFoundError:
            return None  # stopped between the listing and the reading
        except (OSError, pa.ArrowException):
            # Who cannot be read cannot be called silent: no two readings of it are alike.
            text = f"unreadable {uuid.uuid4()}"
        folder, _, name = path.rpartition("/")
        return _parsed(unquote(folder.rpartition("/")[2]), name.removesuffix(".json"), text)


def _parsed(branch: str, writer: str, text: str) -> Heartbeat:
    """The beat in a file. A damaged one still is a writer, whose silence only a watch can prove."""
    try:
        told = json.loads(text)
        written_at = datetime.fromisoformat(told["written_at"])
        interval_s = float(told["interval_s"])
        if not 0 < interval_s <= LONGEST_S or written_at.tzinfo is None:
            raise ValueError("no writer of ours says that")
        return Heartbeat(
            branch=branch,
            writer=writer,
            run_id=str(told["run_id"]),
            kind=told["kind"] if told["kind"] in ("run", "publisher") else "unknown",
            counter=int(told["counter"]),
            written_at=written_at.astimezone(UTC),
            interval_s=interval_s,
            pid=int(told["pid"]),
            host=str(told["host"]),
            instance=str(told.get("instance") or ""),
            text=text,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        # OverflowError: `1e999` for a number, or a time at the end of all times. It once stopped every pass.
        return Heartbeat(branch, writer, run_id="", kind="unknown", text=text)
