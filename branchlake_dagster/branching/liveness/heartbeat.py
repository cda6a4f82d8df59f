"""The writer's side of heartbeats: a thread that does nothing else, so that a busy run still beats.

A beat that hangs in a slow store must not stop the next one (apache/hudi#18903: a live writer was taken for
dead), so each is written by a short-lived thread of its own while the timer goes on.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing import parent_process
from multiprocessing.util import Finalize

from branchlake_dagster.branching.liveness.heartbeat_store import Heartbeat, HeartbeatStore, Kind, new_writer

_log = logging.getLogger(__name__)
_MOST_IN_FLIGHT = 4
_PATIENCE_S = 2.0


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
        self._ended: Callable[[], bool] | None = None
        self._timer = threading.Thread(target=self._run, name=f"heartbeat-{beat.branch}", daemon=True)

    def start(self) -> None:
        """Begin; the first beat is written at once, without waiting for it."""
        self._timer.start()

    def linger(self, ended: Callable[[], bool] | None) -> None:
        """Heartbeat on until `ended` says so or the process exits; None: until `stop` again."""
        self._ended = ended

    def stop(self) -> None:
        """End and remove the file: a writer that ended well is not a dead one."""
        self._stopped.set()
        self._timer.join(_PATIENCE_S)
        until = time.monotonic() + _PATIENCE_S
        for write in self._writes:
            # A write that is still under way would bring the file back.
            write.join(max(0.0, until - time.monotonic()))
        self._remove()

    def _run(self) -> None:
        counter = 0
        while True:
            self._writes = [write for write in self._writes if write.is_alive()]
            counter += 1
            if len(self._writes) < _MOST_IN_FLIGHT:
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
        if self._ended is not None and not self._stopped.is_set() and _says_yes(self._ended):
            self._stopped.set()
            self._remove()

    def _remove(self) -> None:
        try:
            self._store.remove(self._beat.branch, self._beat.writer)
        except Exception as error:  # noqa: BLE001 - the file is stale soon; the work it stood for is done
            self._log.warning("Heartbeat of %s was not removed: %s", self._beat.branch, error)

    @property
    def stopped(self) -> bool:
        """Whether it beats no more."""
        return self._stopped.is_set()


class SharedHeartbeats:
    """One heartbeat per store and branch in this process, however many resources work on the branch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._beating: dict[tuple[str, str], tuple[HeartbeatThread, int]] = {}

    def take(self, store: HeartbeatStore, beat: Heartbeat) -> tuple[str, str]:
        """Heartbeat from now on; the answer is what `give_back` wants."""
        key = (store.root, beat.branch)
        with self._lock:
            heart, users = self._beating.get(key, (None, 0))
            if heart is not None:
                heart.linger(None)
            if heart is None or heart.stopped:
                heart = HeartbeatThread(store, beat)
                heart.start()
            self._beating[key] = (heart, users + 1)
        return key

    def give_back(self, key: tuple[str, str], ended: Callable[[], bool] | None = None) -> None:
        """The last one to give it back ends it: at once, or with the process, or when `ended` says so.

        A worker's last step is not its last act: killed before the run's end, it would not be missed.
        """
        with self._lock:
            heart, users = self._beating.pop(key)
            if users > 1 or (ended is not None and own_process()):
                self._beating[key] = (heart, users - 1)
            if users > 1:
                return
            if ended is not None and own_process():
                heart.linger(ended)
                Finalize(None, self._exit, args=(key,), exitpriority=1)
                return
        heart.stop()

    def _exit(self, key: tuple[str, str]) -> None:
        with self._lock:
            heart, _ = self._beating.pop(key, (None, 0))
        if heart is not None and not heart.stopped:
            heart.stop()


def own_process() -> bool:
    """Whether this process was started for a run or a step, and so ends soon after it."""
    return parent_process() is not None or {"execute_run", "execute_step"}.intersection(sys.argv) != set()


def _says_yes(ended: Callable[[], bool]) -> bool:
    try:
        return ended()
    except Exception:  # noqa: BLE001 - Dagster's storage does not answer; asked again with the next beat
        return False


def first_heartbeat(
    branch: str, *, run_id: str, interval_s: float, kind: Kind = "run", instance: str = ""
) -> Heartbeat:
    """What this process says about itself; the counter and the time come with each beat."""
    return Heartbeat(
        branch,
        new_writer(),
        run_id,
        kind,
        interval_s=interval_s,
        pid=os.getpid(),
        host=socket.gethostname(),
        instance=instance,
    )


@contextmanager
def beating(
    store: HeartbeatStore, branch: str, *, run_id: str, interval_s: float, kind: Kind = "run"
) -> Iterator[None]:
    """Heartbeat for `branch` while the body runs."""
    heart = HeartbeatThread(store, first_heartbeat(branch, run_id=run_id, interval_s=interval_s, kind=kind))
    heart.start()
    try:
        yield
    finally:
        heart.stop()
