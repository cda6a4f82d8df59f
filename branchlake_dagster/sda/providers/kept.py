"""Store a provider's answers and request times on disk, so that limits hold across processes and restarts."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from branchlake_dagster.sda.providers.download import ProviderClock
from branchlake_dagster.sda.providers.errors import ProviderBusy


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file among the processes of this machine."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with Path(f"{path}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _write_atomically(path: Path, content: bytes) -> None:
    """Replace a file atomically: after a crash it is either the old one or the new one."""
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}")
    temporary_path.write_bytes(content)
    temporary_path.replace(path)


@dataclass(frozen=True)
class CachedAnswer:
    """A cached answer.

    `fetched_at` is the time of its download and `asked_at` of the last request, in UTC seconds since 1970.
    """

    body: bytes
    fetched_at: float
    asked_at: float
    etag: str | None
    last_modified: str | None

    def conditional_headers(self) -> dict[str, str]:
        """Return the headers of a conditional request, which transfers the answer only if it changed."""
        headers = {"If-None-Match": self.etag, "If-Modified-Since": self.last_modified}
        return {name: value for name, value in headers.items() if value}


class AnswerCache:
    """Caches answers by query, with one file for the body and one for its metadata."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def answer_path(self, query: str) -> Path:
        """Return the path of a query's files, without suffix."""
        return self._folder / hashlib.sha256(query.encode()).hexdigest()[:32]

    def get(self, query: str) -> CachedAnswer | None:
        """Return the cached answer, or None if it is missing or damaged."""
        path = self.answer_path(query)
        try:
            metadata = json.loads(path.with_suffix(".json").read_text())
            body = path.with_suffix(".body").read_bytes()
            if hashlib.sha256(body).hexdigest() != metadata.pop("sha256"):
                return None
            return CachedAnswer(body=body, **metadata)
        except (OSError, ValueError, TypeError, KeyError):
            return None  # a crash between the two files, or a damaged file: the caller downloads it again

    def store(self, query: str, answer: CachedAnswer) -> CachedAnswer:
        """Store an answer in place of the previous one, and return it."""
        path = self.answer_path(query)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        metadata = {name: value for name, value in asdict(answer).items() if name != "body"}
        _write_atomically(path.with_suffix(".body"), answer.body)
        metadata_json = json.dumps(metadata | {"sha256": hashlib.sha256(answer.body).hexdigest()})
        _write_atomically(path.with_suffix(".json"), metadata_json.encode())
        return answer

    def update(self, query: str, cached_answer: CachedAnswer | None, answer: CachedAnswer) -> CachedAnswer:
        """Store a new answer. If its body is that of the cached one, this keeps its time of download.

        So an equal answer is the same pull. A time in the future comes from a wrong clock and is not kept.
        """
        if cached_answer is not None and cached_answer.body == answer.body:
            answer = replace(answer, fetched_at=min(cached_answer.fetched_at, answer.fetched_at))
        return self.store(query, answer)

    def mark_unchanged(self, query: str, answer: CachedAnswer, asked_at: float) -> CachedAnswer:
        """Record that the provider was asked and has nothing newer; return the updated answer."""
        return self.store(query, replace(answer, asked_at=asked_at))


class RateLimit:
    """Limits the requests of all processes that share a file.

    Each of the `windows` (requests, seconds) allows so many requests in any span of so many seconds.
    """

    def __init__(
        self,
        path: Path,
        windows: Sequence[tuple[int, float]],
        *,
        most_wait_s: float,
        provider: str,
        clock: ProviderClock,
    ) -> None:
        self._path = path
        self._windows = windows
        self._most_wait_s = most_wait_s
        self._provider = provider
        self._clock = clock

    def acquire(self) -> None:
        """Wait until a request is allowed, and count it.

        Raises:
            ProviderBusy: the wait would be longer than `most_wait_s`.

        """
        with lock_file(self._path):
            now = self._clock.wall_time()
            longest_window_s = max(seconds for _, seconds in self._windows)
            # After the clock was set back, request times in the future still count, so that the limit holds.
            request_times = sorted(
                request_time
                for request_time in self._load_request_times()
                if request_time > now - longest_window_s
            )
            wait = max(
                (self._seconds_until_free(request_times, now, *window) for window in self._windows),
                default=0.0,
            )
            if wait > self._most_wait_s:
                raise ProviderBusy(
                    f"{self._provider} allows no further request for {wait:.0f} s.",
                    hint="The limits apply to all processes together. The next pull tries again.",
                )
            if wait > 0:
                self._clock.sleep(wait)
            _write_atomically(
                self._path, json.dumps([*request_times, max(self._clock.wall_time(), now + wait)]).encode()
            )

    @staticmethod
    def _seconds_until_free(
        request_times: list[float], now: float, max_requests: int, seconds: float
    ) -> float:
        times_in_window = [request_time for request_time in request_times if request_time > now - seconds]
        return 0.0 if len(times_in_window) < max_requests else times_in_window[-max_requests] + seconds - now

    def _load_request_times(self) -> list[float]:
        try:
            request_times = json.loads(self._path.read_text())
            return [float(request_time) for request_time in request_times]
        except (OSError, ValueError, TypeError):
            return []
