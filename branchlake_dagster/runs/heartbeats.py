"""Heartbeat files of writing processes: the thread that writes them, and their store in the warehouse.

The writer's side of heartbeats: a thread that does nothing else, so that a busy run still beats.

A beat that hangs in a slow store must not stop the next one (apache/hudi#18903: a live writer was taken for
dead), so each is written by a short-lived thread of its own while the timer goes on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import quote, unquote

import pyarrow as pa
from pyarrow.fs import FileInfo, FileSelector, FileType, LocalFileSystem
from pyiceberg.io.pyarrow import PyArrowFileIO

from branchlake_dagster.errors import BranchlakeError, Transient
from branchlake_dagster.settings import Settings
from branchlake_dagster.stored_names import LakeFolder

MISSED_INTERVALS = 3
"""So many intervals of silence make a writer suspect, and as many under watch make it dead."""

WriterKind = Literal["run", "publisher", "unknown"]
"""Who beats; `unknown` stands for a file that does not tell, which counts as both."""

MAX_INTERVAL_S = 3600.0
"""The longest interval that is believed."""
_MAX_FILE_BYTES = 64 * 1024
_READERS = 8


class HeartbeatsUnreadable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """The folder of heartbeats cannot be read, so nobody can say which writers are alive."""


def new_writer_name() -> str:
    """A name for a writing process that no other one has."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True)
class Heartbeat:
    """What one writer said last. `counter` grows with each beat; `written_at` is the writer's own clock."""

    branch: str
    writer: str
    run_id: str
    kind: WriterKind = "run"
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
    def max_silence_s(self) -> float:
        """The silence in seconds that makes the writer suspect."""
        return MISSED_INTERVALS * self.interval_s


class HeartbeatStore:
    """Reads and writes heartbeat files in the warehouse, with a file system client of its own.

    `properties` are PyIceberg's for FileIO. Safe to share between threads.
    """

    def __init__(self, warehouse: str, properties: Mapping[str, str] | None = None) -> None:
        io = PyArrowFileIO(dict(properties or {}))
        scheme, netloc, path = io.parse_location(
            f"{warehouse.rstrip('/')}/{LakeFolder.HEARTBEATS}", io.properties
        )
        self._files: Any = io.fs_by_scheme(scheme, netloc)
        self.root = path

    @classmethod
    def from_settings(cls, settings: Settings) -> HeartbeatStore:
        """The store of a lake."""
        return cls(settings.warehouse_uri, settings.file_io_properties())

    def _path(self, branch: str, writer: str) -> str:
        return f"{self.root}/{quote(branch, safe='')}/{writer}.json"

    def write(self, beat: Heartbeat) -> None:
        """Replace the writer's file. Raises OSError."""
        path = self._path(beat.branch, beat.writer)
        fields = {k: v for k, v in asdict(beat).items() if k != "text"}
        fields["written_at"] = beat.written_at.isoformat() if beat.written_at else None
        # An object store shows an object whole or not at all; a local file needs the rename for that.
        local = isinstance(self._files, LocalFileSystem)
        target = f"{path}.{beat.counter}.tmp" if local else path
        with self._files.open_output_stream(target) as stream:
            stream.write(json.dumps(fields).encode())
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
            infos = self._list_files()
            paths = [i.path for i in infos if i.type is FileType.File and i.path.endswith(".json")]
            with ThreadPoolExecutor(_READERS) as pool:
                return tuple(beat for beat in pool.map(self._read_heartbeat, paths) if beat is not None)
        except (OSError, pa.ArrowException) as error:
            raise HeartbeatsUnreadable(
                f"The heartbeats in {self.root} cannot be read: {type(error).__name__}.",
                hint="Nobody can say which writers are alive; nothing is cleaned up until they can be read.",
            ) from error

    def _list_files(self) -> list[FileInfo]:
        everything = FileSelector(self.root, recursive=True, allow_not_found=True)
        try:
            return cast(list[FileInfo], self._files.get_file_info(everything))
        except FileNotFoundError:
            # PyArrow lists, then asks whether the folder exists: one that the first writer makes between
            # the two is "not found" although `allow_not_found` says that nothing is wrong. It is there now.
            return cast(list[FileInfo], self._files.get_file_info(everything))

    def _read_heartbeat(self, path: str) -> Heartbeat | None:
        try:
            with self._files.open_input_stream(path) as stream:
                content = stream.read(_MAX_FILE_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return None  # stopped between the listing and the reading
        except (OSError, pa.ArrowException):
            # Who cannot be read cannot be called silent: no two readings of it are alike.
            content = f"unreadable {uuid.uuid4()}"
        folder, _, name = path.rpartition("/")
        return _parse_heartbeat(unquote(folder.rpartition("/")[2]), name.removesuffix(".json"), content)


def _parse_heartbeat(branch: str, writer: str, content: str) -> Heartbeat:
    """The beat in a file. A damaged one still is a writer, whose silence only a watch can prove."""
    try:
        fields = json.loads(content)
        written_at = datetime.fromisoformat(fields["written_at"])
        interval_s = float(fields["interval_s"])
        if not 0 < interval_s <= MAX_INTERVAL_S or written_at.tzinfo is None:
            raise ValueError("no writer of ours says that")
        return Heartbeat(
            branch=branch,
            writer=writer,
            run_id=str(fields["run_id"]),
            kind=fields["kind"] if fields["kind"] in ("run", "publisher") else "unknown",
            counter=int(fields["counter"]),
            written_at=written_at.astimezone(UTC),
            interval_s=interval_s,
            pid=int(fields["pid"]),
            host=str(fields["host"]),
            instance=str(fields.get("instance") or ""),
            text=content,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        # OverflowError: `1e999` for a number, or a time at the end of all times. It once stopped every pass.
        return Heartbeat(branch, writer, run_id="", kind="unknown", text=content)


_log = logging.getLogger(__name__)
_MAX_PENDING_WRITES = 4
_STOP_TIMEOUT_S = 2.0


class HeartbeatThread:
    """Beats for one branch from `start` to `stop`. Never raises into the work it stands for."""

    def __init__(
        self,
        store: HeartbeatStore,
        beat: Heartbeat,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        log: logging.Logger = _log,
    ) -> None:
        self._store = store
        self._beat = beat
        self._now = now
        self._log = log
        self._stopped = threading.Event()
        self._failing = False
        self._writes: list[threading.Thread] = []
        self._has_ended: Callable[[], bool] | None = None
        self._timer = threading.Thread(target=self._run, name=f"heartbeat-{beat.branch}", daemon=True)

    def start(self) -> None:
        """Begin; the first beat is written at once, without waiting for it."""
        self._timer.start()

    def continue_until(self, has_ended: Callable[[], bool] | None) -> None:
        """Heartbeat on until `has_ended` says so or the process exits; None: until `stop` again."""
        self._has_ended = has_ended

    def stop(self) -> None:
        """End and remove the file: a writer that ended well is not a dead one."""
        self._stopped.set()
        self._timer.join(_STOP_TIMEOUT_S)
        until = time.monotonic() + _STOP_TIMEOUT_S
        for write in self._writes:
            # A write that is still under way would bring the file back.
            write.join(max(0.0, until - time.monotonic()))
        self._remove()

    def _run(self) -> None:
        counter = 0
        while True:
            self._writes = [write for write in self._writes if write.is_alive()]
            counter += 1
            if len(self._writes) < _MAX_PENDING_WRITES:
                beat = replace(self._beat, counter=counter, written_at=self._now())
                write = threading.Thread(target=self._write, args=(beat,), daemon=True)
                self._writes.append(write)
                write.start()
            if self._stopped.wait(self._beat.interval_s):
                return

    def _write(self, beat: Heartbeat) -> None:
        try:
            self._store.write(beat)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next beat tries again
            if not self._failing:
                self._failing = True
                self._log.warning(
                    "Heartbeat of %s failed, trying again every %g s: %s",
                    beat.branch,
                    beat.interval_s,
                    error,
                )
        else:
            self._failing = False
        # Here and not in the timer: the question may hang as a slow store does.
        if self._has_ended is not None and not self._stopped.is_set() and _is_run_over(self._has_ended):
            self._stopped.set()
            self._remove()

    def _remove(self) -> None:
        try:
            self._store.remove(self._beat.branch, self._beat.writer)
        except Exception as error:  # noqa: BLE001 - the file is stale soon; the work it stood for is done
            self._log.warning("Heartbeat of %s was not removed: %s", self._beat.branch, error)

    @property
    def is_stopped(self) -> bool:
        """Whether it beats no more."""
        return self._stopped.is_set()


class SharedHeartbeats:
    """One heartbeat per store and branch in this process, however many resources work on the branch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[tuple[str, str], tuple[HeartbeatThread, int]] = {}

    def acquire(self, store: HeartbeatStore, beat: Heartbeat) -> tuple[str, str]:
        """Heartbeat from now on; the answer is what `release` wants."""
        key = (store.root, beat.branch)
        with self._lock:
            thread, user_count = self._threads.get(key, (None, 0))
            if thread is not None:
                thread.continue_until(None)
            if thread is None or thread.is_stopped:
                thread = HeartbeatThread(store, beat)
                thread.start()
            self._threads[key] = (thread, user_count + 1)
        return key

    def release(self, key: tuple[str, str], has_ended: Callable[[], bool] | None = None) -> None:
        """The last one to give it back ends it: at once, or with the process, or when `has_ended` says so.

        A worker's last step is not its last act: killed before the run's end, it would not be missed.
        """
        with self._lock:
            thread, user_count = self._threads.pop(key)
            if user_count > 1 or (has_ended is not None and is_run_process()):
                self._threads[key] = (thread, user_count - 1)
            if user_count > 1:
                return
            if has_ended is not None and is_run_process():
                thread.continue_until(has_ended)
                Finalize(None, self._release_at_exit, args=(key,), exitpriority=1)
                return
        thread.stop()

    def _release_at_exit(self, key: tuple[str, str]) -> None:
        with self._lock:
            thread, _ = self._threads.pop(key, (None, 0))
        if thread is not None and not thread.is_stopped:
            thread.stop()


def is_run_process() -> bool:
    """Whether this process was started for a run or a step, and so ends soon after it."""
    return parent_process() is not None or {"execute_run", "execute_step"}.intersection(sys.argv) != set()


def _is_run_over(has_ended: Callable[[], bool]) -> bool:
    try:
        return has_ended()
    except Exception:  # noqa: BLE001 - Dagster's storage does not answer; asked again with the next beat
        return False


def build_heartbeat(
    branch: str, *, run_id: str, interval_s: float, kind: WriterKind = "run", instance: str = ""
) -> Heartbeat:
    """What this process says about itself; the counter and the time come with each beat."""
    return Heartbeat(
        branch,
        new_writer_name(),
        run_id,
        kind,
        interval_s=interval_s,
        pid=os.getpid(),
        host=socket.gethostname(),
        instance=instance,
    )


@contextmanager
def send_heartbeats(
    store: HeartbeatStore, branch: str, *, run_id: str, interval_s: float, kind: WriterKind = "run"
) -> Iterator[None]:
    """Heartbeat for `branch` while the body runs."""
    thread = HeartbeatThread(store, build_heartbeat(branch, run_id=run_id, interval_s=interval_s, kind=kind))
    thread.start()
    try:
        yield
    finally:
        thread.stop()
