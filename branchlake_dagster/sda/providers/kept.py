"""What is remembered on disk of a provider, so that limits hold across restarts and between processes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from branchlake_dagster.sda.providers.download import Surroundings
from branchlake_dagster.sda.providers.errors import ProviderBusy


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone with a file among the processes of this machine."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with Path(f"{path}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: a reader after a crash finds the old file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


@dataclass(frozen=True)
class Entry:
    """An answer that is kept. Times are UTC seconds since 1970: of its download, and of the last question."""

    body: bytes
    fetched_at: float
    asked_at: float
    etag: str | None
    last_modified: str | None

    def conditions(self) -> dict[str, str]:
        """Headers that ask for an answer only if it is another one."""
        wanted = {"If-None-Match": self.etag, "If-Modified-Since": self.last_modified}
        return {name: value for name, value in wanted.items() if value}


class AnswerCache:
    """Answers by query, one file for the body and one for what is known of it."""

    def __init__(self, folder: Path, wall: Surroundings) -> None:
        self._folder = folder
        self._wall = wall.wall

    def path(self, query: str) -> Path:
        """Where the answer to a query is kept."""
        return self._folder / hashlib.sha256(query.encode()).hexdigest()[:32]

    def get(self, query: str) -> Entry | None:
        """The kept answer; None when there is none, or none that is whole."""
        path = self.path(query)
        try:
            known = json.loads(path.with_suffix(".json").read_text())
            body = path.with_suffix(".body").read_bytes()
            if hashlib.sha256(body).hexdigest() != known.pop("sha256"):
                return None
            return Entry(body=body, **known)
        except (OSError, ValueError, TypeError, KeyError):
            return None  # a crash between the two files, or a damaged disk: it is fetched again

    def put(self, query: str, entry: Entry) -> Entry:
        """Keep an answer in place of the one before."""
        path = self.path(query)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        known = {name: value for name, value in asdict(entry).items() if name != "body"}
        _write(path.with_suffix(".body"), entry.body)
        told = json.dumps(known | {"sha256": hashlib.sha256(entry.body).hexdigest()})
        _write(path.with_suffix(".json"), told.encode())
        return entry

    def still_true(self, query: str, entry: Entry) -> Entry:
        """Note that the provider was asked just now and has nothing newer."""
        return self.put(query, replace(entry, asked_at=self._wall()))


class RateLimit:
    """At most so many requests in so many seconds, by each of several windows; waits for its turn."""

    def __init__(
        self,
        path: Path,
        windows: Sequence[tuple[int, float]],
        *,
        most_wait_s: float,
        provider: str,
        around: Surroundings,
    ) -> None:
        self._path = path
        self._windows = windows
        self._most_wait_s = most_wait_s
        self._provider = provider
        self._around = around

    def take(self) -> None:
        """Wait until a request is allowed, and count it.

        Raises:
            ProviderBusy: that would be longer than `most_wait_s`.

        """
        with locked(self._path):
            now = self._around.wall()
            longest = max(seconds for _, seconds in self._windows)
            # A clock that was set back leaves requests of the future: they count, or the limit would break.
            made = sorted(one for one in self._read() if one > now - longest)
            wait = max((self._until_free(made, now, *window) for window in self._windows), default=0.0)
            if wait > self._most_wait_s:
                raise ProviderBusy(
                    f"{self._provider} allows no further request for {wait:.0f} s.",
                    hint="Its limits are for all processes together; the next pull asks again.",
                )
            if wait > 0:
                self._around.sleep(wait)
            _write(self._path, json.dumps([*made, max(self._around.wall(), now + wait)]).encode())

    @staticmethod
    def _until_free(made: list[float], now: float, most: int, seconds: float) -> float:
        inside = [one for one in made if one > now - seconds]
        return 0.0 if len(inside) < most else inside[-most] + seconds - now

    def _read(self) -> list[float]:
        try:
            found = json.loads(self._path.read_text())
            return [float(one) for one in found]
        except (OSError, ValueError, TypeError):
            return []
