"""Write heartbeat files of processes from a thread, and store them in the warehouse.

A separate thread writes the heartbeats, so that a busy run still beats. A write that hangs in a slow store
must not delay the next one: a live writer was once declared dead for this reason (apache/hudi#18903). So a
short-lived thread makes each write while the timer continues.
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
"""A writer is suspect after this many intervals of silence, and dead after as many more under watch."""

WriterKind = Literal["run", "publisher", "unknown"]
"""The kind of a writer; `unknown` if its file does not record the kind, which counts as both others."""

MAX_INTERVAL_S = 3600.0
"""The longest interval in seconds that a reader accepts."""
_MAX_FILE_BYTES = 64 * 1024
_READERS = 8


class HeartbeatsUnreadable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """The folder of heartbeats cannot be read, so it is unknown which writers are alive."""


def new_writer_name() -> str:
    """Return a unique name for a writing process."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


_process_start = datetime.now(UTC)


def _restart_process_clock() -> None:
    global _process_start
    _process_start = datetime.now(UTC)


# The template of the warm launcher may be days old when it forks the process of a run.
os.register_at_fork(after_in_child=_restart_process_clock)


def process_start() -> datetime:
    """Return the time at which this process loaded this package, or was forked.

    The process cannot have written to a branch before this time.
    """
    return _process_start


@dataclass(frozen=True)
class Heartbeat:
    """The last heartbeat of one writer.

    `counter` grows with each beat. `written_at` and `started_at`, the start of the writer's process, are from
    the writer's clock. `started_at` is None in heartbeats of version 0.1.0.
    """

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
    """The Dagster instance of the run; empty if it is not recorded."""
    started_at: datetime | None = None
    text: str = field(default="", repr=False)
    """The file's content. Two readings that differ prove that the writer wrote in between."""

    @property
    def max_silence_s(self) -> float:
        """The silence in seconds after which the writer is suspect."""
        return MISSED_INTERVALS * self.interval_s


class HeartbeatStore:
    """Reads and writes heartbeat files in the warehouse, with its own file system client.

    `properties` are PyIceberg's FileIO properties. Safe to share between threads.
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
        """Return the store of the heartbeats in the warehouse that the settings name."""
        return cls(settings.warehouse_uri, settings.file_io_properties())

    def _path(self, branch: str, writer: str) -> str:
        return f"{self.root}/{quote(branch, safe='')}/{writer}.json"

    def write(self, beat: Heartbeat) -> None:
        """Atomic: replace the file of the writer and branch that `beat` names.

        Readers see the old or the new heartbeat. Raises OSError if the storage refuses the write.
        """
        path = self._path(beat.branch, beat.writer)
        fields = {k: v for k, v in asdict(beat).items() if k != "text"}
        for name in ("written_at", "started_at"):
            fields[name] = fields[name].isoformat() if fields[name] else None
        # An object store replaces objects atomically. A local file needs a rename for that.
        local = isinstance(self._files, LocalFileSystem)
        target = f"{path}.{beat.counter}.tmp" if local else path
        with self._files.open_output_stream(target) as stream:
            stream.write(json.dumps(fields).encode())
        if local:
            self._files.move(target, path)

    def remove(self, branch: str, writer: str) -> None:
        """Remove the heartbeat file of a writer for one branch. A missing file is not an error."""
        path = self._path(branch, writer)
        with contextlib.suppress(FileNotFoundError):
            self._files.delete_file(path)
        if isinstance(self._files, LocalFileSystem):
            folder = Path(path).parent
            for unfinished in folder.glob(
                f"{writer}.json.*.tmp"
            ):  # of a process killed in the middle of a beat
                unfinished.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another process uses the folder, or S3 has no folders
                folder.rmdir()

    def all(self) -> tuple[Heartbeat, ...]:
        """Load the last heartbeat of every writer. Raises HeartbeatsUnreadable if the files cannot be listed.

        A damaged or unreadable file is returned as a heartbeat without time, of a writer of unknown kind.
        """
        try:
            infos = self._list_files()
            paths = [i.path for i in infos if i.type is FileType.File and i.path.endswith(".json")]
            with ThreadPoolExecutor(_READERS) as pool:
                return tuple(beat for beat in pool.map(self._read_heartbeat, paths) if beat is not None)
        except (OSError, pa.ArrowException) as error:
            raise HeartbeatsUnreadable(
                f"The heartbeats in folder {self.root} cannot be read: {type(error).__name__}.",
                hint="It is unknown which writers are alive, so nothing is cleaned up. Make the folder"
                " readable.",
            ) from error

    def _list_files(self) -> list[FileInfo]:
        everything = FileSelector(self.root, recursive=True, allow_not_found=True)
        try:
            return cast(list[FileInfo], self._files.get_file_info(everything))
        except FileNotFoundError:
            # PyArrow lists the folder, then checks whether it exists. If the first writer creates the folder
            # in between, PyArrow raises despite `allow_not_found`. The folder exists now, so list it again.
            return cast(list[FileInfo], self._files.get_file_info(everything))

    def _read_heartbeat(self, path: str) -> Heartbeat | None:
        try:
            with self._files.open_input_stream(path) as stream:
                content = stream.read(_MAX_FILE_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return None  # the writer stopped between the listing and the reading
        except (OSError, pa.ArrowException):
            # An unreadable writer must not count as silent, so each reading gets a different text.
            content = f"unreadable {uuid.uuid4()}"
        folder, _, name = path.rpartition("/")
        return _parse_heartbeat(unquote(folder.rpartition("/")[2]), name.removesuffix(".json"), content)


def _parse_heartbeat(branch: str, writer: str, content: str) -> Heartbeat:
    """Parse a heartbeat file. A damaged file gives a heartbeat without time, so its writer is suspect.

    Only repeated readings of the file can then prove that the writer is silent.
    """
    try:
        fields = json.loads(content)
        written_at = datetime.fromisoformat(fields["written_at"])
        started_at = datetime.fromisoformat(fields["started_at"]) if fields.get("started_at") else None
        if started_at is not None and started_at.tzinfo is None:
            raise ValueError("not a valid heartbeat")
        interval_s = float(fields["interval_s"])
        if not 0 < interval_s <= MAX_INTERVAL_S or written_at.tzinfo is None:
            raise ValueError("not a valid heartbeat")
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
            started_at=started_at.astimezone(UTC) if started_at else None,
            text=content,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        # OverflowError: a number such as `1e999`, or a time out of range. It once stopped every pass.
        return Heartbeat(branch, writer, run_id="", kind="unknown", text=content)


_log = logging.getLogger(__name__)
_MAX_PENDING_WRITES = 4
_STOP_TIMEOUT_S = 2.0


class HeartbeatThread:
    """Sends heartbeats for one branch from `start` to `stop`.

    Errors of the storage are logged and never raised into the caller's work.
    """

    def __init__(self, store: HeartbeatStore, beat: Heartbeat) -> None:
        self._store = store
        self._beat = beat
        self._stopped = threading.Event()
        self._failing = False
        self._writes: list[threading.Thread] = []
        self._has_ended: Callable[[], bool] | None = None
        self._timer = threading.Thread(target=self._run, name=f"heartbeat-{beat.branch}", daemon=True)

    def start(self) -> None:
        """Start the thread. It writes the first heartbeat at once; this call does not wait for it."""
        self._timer.start()

    def continue_until(self, has_ended: Callable[[], bool] | None) -> None:
        """Let the thread stop by itself once `has_ended` returns true; it is called after each heartbeat.

        With None, the thread continues until `stop` is called.
        """
        self._has_ended = has_ended

    def stop(self) -> None:
        """Stop the thread and remove the heartbeat file: a writer that ended normally must not look dead."""
        self._stopped.set()
        self._timer.join(_STOP_TIMEOUT_S)
        until = time.monotonic() + _STOP_TIMEOUT_S
        for write in self._writes:
            # A pending write would create the file again.
            write.join(max(0.0, until - time.monotonic()))
        self._remove()

    def _run(self) -> None:
        counter = 0
        while True:
            self._writes = [write for write in self._writes if write.is_alive()]
            counter += 1
            if len(self._writes) < _MAX_PENDING_WRITES:
                beat = replace(self._beat, counter=counter, written_at=datetime.now(UTC))
                write = threading.Thread(target=self._write, args=(beat,), daemon=True)
                try:
                    write.start()
                except RuntimeError:
                    # The system allows no more threads at present. Without heartbeats the run would count as
                    # dead, so the timer writes this one itself, although a slow storage delays the next.
                    self._write(beat)
                else:
                    self._writes.append(write)
            if self._stopped.wait(self._beat.interval_s):
                return

    def _write(self, beat: Heartbeat) -> None:
        try:
            self._store.write(beat)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next beat tries again
            if not self._failing:
                self._failing = True
                _log.warning(
                    "Heartbeat of %s failed, trying again every %g s: %s",
                    beat.branch,
                    beat.interval_s,
                    error,
                )
        else:
            self._failing = False
        # The timer does not call this, because the call may hang like a slow store.
        if self._has_ended is not None and not self._stopped.is_set() and _is_run_over(self._has_ended):
            self._stopped.set()
            self._remove()

    def _remove(self) -> None:
        try:
            self._store.remove(self._beat.branch, self._beat.writer)
        except Exception as error:  # noqa: BLE001 - the file is stale soon; the work it stood for is done
            _log.warning("Heartbeat of %s was not removed: %s", self._beat.branch, error)

    @property
    def is_stopped(self) -> bool:
        """Whether the thread has stopped by itself or `stop` was called."""
        return self._stopped.is_set()


class SharedHeartbeats:
    """Shares one heartbeat per store and branch among all resources of this process that use the branch."""

    def __init__(self) -> None:
        # Reentrant: a finalizer that runs while this thread holds the lock may end a resource.
        self._lock = threading.RLock()
        self._threads: dict[tuple[str, str], tuple[HeartbeatThread, int]] = {}

    def acquire(self, store: HeartbeatStore, beat: Heartbeat) -> tuple[str, str]:
        """Send heartbeats for the branch of `beat` from now on, and return the key for `release`.

        If the process already sends heartbeats for this branch, those are shared.
        """
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
        """Release a shared heartbeat, which ends after its last user has released it.

        It ends at once. Exception: in a process that was started for a run, and with `has_ended`, it
        continues until `has_ended` returns true or the process exits. Otherwise a worker that is killed
        between its last step and the end of its run would not be noticed.
        """
        with self._lock:
            thread, user_count = self._threads[key]
            self._threads[key] = (thread, user_count - 1)
            if user_count > 1:
                return
            if has_ended is None or not is_run_process():
                del self._threads[key]
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
    """Return whether this process was started for a run or a step, and so ends soon after it."""
    return parent_process() is not None or {"execute_run", "execute_step"}.intersection(sys.argv) != set()


def _is_run_over(has_ended: Callable[[], bool]) -> bool:
    try:
        return has_ended()
    except Exception:  # noqa: BLE001 - Dagster's storage does not answer; asked again with the next beat
        return False


def build_heartbeat(
    branch: str, *, run_id: str, interval_s: float, kind: WriterKind = "run", instance: str = ""
) -> Heartbeat:
    """Return the heartbeat of this process for `branch`, under a new unique writer name.

    Each beat sets its counter and time later. `interval_s` is the time between beats in seconds. `kind` says
    whether the writer executes the run or publishes it. `instance` is the id of the Dagster instance; empty
    if it is not recorded.
    """
    return Heartbeat(
        branch,
        new_writer_name(),
        run_id,
        kind,
        interval_s=interval_s,
        pid=os.getpid(),
        host=socket.gethostname(),
        instance=instance,
        started_at=process_start(),
    )


@contextmanager
def send_heartbeats(
    store: HeartbeatStore, branch: str, *, run_id: str, interval_s: float, kind: WriterKind = "run"
) -> Iterator[None]:
    """Send heartbeats for `branch` from a thread while the body runs.

    A beat is written every `interval_s` seconds. `kind` says whether this process executes the run or
    publishes it.
    """
    thread = HeartbeatThread(store, build_heartbeat(branch, run_id=run_id, interval_s=interval_s, kind=kind))
    thread.start()
    try:
        yield
    finally:
        thread.stop()
