"""One bounded, retried GET (or login POST): timeouts, sizes, and which failures are worth another try."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import requests
import tenacity

from branchlake_dagster.sda.providers.errors import ProviderRefused, ProviderUnavailable

NOT_MODIFIED = 304
_WORTH_ANOTHER_TRY = frozenset({408, 429, *range(500, 600)})
_BLOCK = 1 << 16
_SHOWN = 200


@dataclass(frozen=True)
class Answer:
    """A provider's answer; header names are in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True)
class RetryRule:
    """Seconds. Waits double from `first_wait_s` to `most_wait_s`, by half to all of that, `tries` in all.

    Nothing is begun later than `give_up_s` after the first try.
    """

    tries: int = 4
    first_wait_s: float = 1.0
    most_wait_s: float = 30.0
    give_up_s: float = 300.0


@dataclass(frozen=True)
class Surroundings:
    """Time and chance, passed in: wall clock for what is kept, a monotonic one for spans, seconds."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = field(default_factory=lambda: random.SystemRandom().random)


class _TryAgain(Exception):  # noqa: N818
    """Internal: an answer or a silence that a later try may mend."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class Downloader:
    """Asks one provider. Not thread-safe, as its session's cookies are not."""

    def __init__(
        self,
        provider: str,
        *,
        connect_s: float,
        read_s: float,
        max_bytes: int,
        retry: RetryRule,
        around: Surroundings,
    ) -> None:
        self._provider = provider
        self._timeouts = (connect_s, read_s)
        self._max_bytes = max_bytes
        self._retry = retry
        self._around = around
        self._session = requests.Session()
        self._session.headers["User-Agent"] = "branchlake_dagster (GP catalogue ingestion)"

    def ask(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        form: Mapping[str, str] | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> Answer:
        """The answer to a GET, or with `form` to a POST; `before` is called before every try.

        Any status that is not worth another try is an answer, also one that refuses.

        Raises:
            ProviderRefused: the answer is larger than what is accepted.
            ProviderUnavailable: no whole answer after all tries.

        """
        rule, around = self._retry, self._around
        begun = around.monotonic()

        def wait(state: tenacity.RetryCallState) -> float:
            failure = state.outcome.exception() if state.outcome else None
            told = failure.wait_s if isinstance(failure, _TryAgain) else None
            if told is not None:
                return told
            longest: float = min(rule.first_wait_s * 2 ** (state.attempt_number - 1), rule.most_wait_s)
            return longest * (0.5 + around.chance() / 2)

        def enough(state: tenacity.RetryCallState) -> bool:
            late = around.monotonic() - begun + state.upcoming_sleep > rule.give_up_s
            return bool(late or state.attempt_number >= rule.tries)

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_TryAgain),
            wait=wait,
            stop=enough,
            sleep=around.sleep,
            reraise=True,
        )

        def attempt() -> Answer:
            before()
            return self._once(url, headers or {}, form, begun + rule.give_up_s)

        try:
            return retrying(attempt)
        except _TryAgain as failure:
            raise ProviderUnavailable(
                f"{self._provider} gave no catalogue: {failure}.",
                hint="Nothing was ingested; the next pull tries again.",
            ) from failure.__cause__

    def _once(
        self, url: str, headers: Mapping[str, str], form: Mapping[str, str] | None, deadline: float
    ) -> Answer:
        method: Any = "GET" if form is None else "POST"
        try:
            with closing(
                self._session.request(
                    method, url, headers=headers, data=form, timeout=self._timeouts, stream=True
                )
            ) as response:
                found = {name.lower(): value for name, value in response.headers.items()}
                body = self._body(response, deadline)
        except requests.RequestException as error:
            # Its text may hold the query but never the form, in which a password is.
            raise _TryAgain(f"{type(error).__name__} at {url.partition('?')[0]}") from error
        if response.status_code in _WORTH_ANOTHER_TRY:
            told = body[:_SHOWN].decode(errors="replace").strip()
            why = f"it answered {response.status_code} {told}".strip()
            raise _TryAgain(why, self._retry_after(found))
        return Answer(response.status_code, body, found)

    def _body(self, response: requests.Response, deadline: float) -> bytes:
        parts, size = [], 0
        for part in response.iter_content(_BLOCK):
            parts.append(part)
            size += len(part)
            if size > self._max_bytes:
                raise ProviderRefused(
                    f"{self._provider} sends more than {self._max_bytes:,} bytes.",
                    hint="Ask for a smaller group, or raise max_download_mb.",
                )
            # The read timeout is for each block; a server that drips one at a time would never be late.
            if self._around.monotonic() > deadline:
                raise _TryAgain("the answer took too long")
        return b"".join(parts)

    def _retry_after(self, headers: Mapping[str, str]) -> float | None:
        """Seconds that the provider asks to be left alone for: a number, or a date."""
        told = headers.get("retry-after", "").strip()
        if told.isdigit():
            return float(told)
        try:
            return max(0.0, parsedate_to_datetime(told).timestamp() - self._around.wall()) if told else None
        except ValueError:
            return None
