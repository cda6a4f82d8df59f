"""Send a GET or login POST request with limits on time and size, and retry temporary failures."""

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
_RETRYABLE_STATUSES = frozenset({408, 429, *range(500, 600)})
_CHUNK_BYTES = 1 << 16
_MAX_SHOWN_BYTES = 200


@dataclass(frozen=True)
class ProviderAnswer:
    """A provider's answer; header names are in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True)
class RetryRule:
    """The number of attempts and the waits between them, in seconds.

    The wait doubles from `first_wait_s` up to `most_wait_s`; a random part of up to half is subtracted. A
    wait that the provider asks for (`Retry-After`) replaces it. No attempt starts later than `give_up_s`
    after the first one, and at most `tries` attempts are made.
    """

    tries: int = 4
    first_wait_s: float = 1.0
    most_wait_s: float = 30.0
    give_up_s: float = 300.0


@dataclass(frozen=True)
class ProviderClock:
    """The sources of time and randomness, replaceable in tests.

    `wall_time` (UTC seconds since 1970) dates stored data, `monotonic` (seconds) measures durations, `sleep`
    waits for seconds, and `random` returns a number from 0 to 1.
    """

    wall_time: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    random: Callable[[], float] = field(default_factory=lambda: random.SystemRandom().random)


class _RetryableFailure(Exception):  # noqa: N818
    """Internal: a failed attempt that may succeed later. `wait_s` is the wait that the provider asks for."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class Downloader:
    """Sends requests to one provider. It is not thread-safe, because its session's cookies are not."""

    def __init__(
        self,
        provider: str,
        *,
        connect_s: float,
        read_s: float,
        max_bytes: int,
        retry: RetryRule,
        clock: ProviderClock,
    ) -> None:
        self._provider = provider
        self._timeouts = (connect_s, read_s)
        self._max_bytes = max_bytes
        self._retry = retry
        self._clock = clock
        self._session = requests.Session()
        self._session.headers["User-Agent"] = "branchlake_dagster (GP catalogue ingestion)"

    def request(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        form: Mapping[str, str] | None = None,
        before_attempt: Callable[[], None] = lambda: None,
    ) -> ProviderAnswer:
        """Send a GET request, or with `form` a POST request, and return the answer.

        Statuses 408, 429 and 5xx are retried; any other status is returned, refusals included. Redirects of
        a POST request are returned too: the form, with its password, is sent to `url` only.
        `before_attempt` is called before every attempt.

        Raises:
            ProviderRefused: the answer is larger than the limit.
            ProviderUnavailable: the provider gave no complete answer in any attempt.

        """
        rule, clock = self._retry, self._clock
        start_time = clock.monotonic()

        def wait(state: tenacity.RetryCallState) -> float:
            failure = state.outcome.exception() if state.outcome else None
            requested_wait_s = failure.wait_s if isinstance(failure, _RetryableFailure) else None
            if requested_wait_s is not None:
                return requested_wait_s
            longest_wait_s: float = min(rule.first_wait_s * 2 ** (state.attempt_number - 1), rule.most_wait_s)
            return longest_wait_s * (0.5 + clock.random() / 2)

        def should_stop(state: tenacity.RetryCallState) -> bool:
            is_late = clock.monotonic() - start_time + state.upcoming_sleep > rule.give_up_s
            return bool(is_late or state.attempt_number >= rule.tries)

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_RetryableFailure),
            wait=wait,
            stop=should_stop,
            sleep=clock.sleep,
            reraise=True,
        )

        def attempt() -> ProviderAnswer:
            before_attempt()
            return self._request_once(url, headers or {}, form, start_time + rule.give_up_s)

        try:
            return retrying(attempt)
        except _RetryableFailure as failure:
            raise ProviderUnavailable(
                f"{self._provider} did not answer the request: {failure}.",
                hint="Nothing was ingested. The next pull tries again.",
            ) from failure.__cause__

    def _request_once(
        self, url: str, headers: Mapping[str, str], form: Mapping[str, str] | None, deadline: float
    ) -> ProviderAnswer:
        method: Any = "GET" if form is None else "POST"
        try:
            with closing(
                self._session.request(
                    method,
                    url,
                    headers=headers,
                    data=form,
                    timeout=self._timeouts,
                    stream=True,
                    allow_redirects=form is None,
                )
            ) as response:
                response_headers = {name.lower(): value for name, value in response.headers.items()}
                body = self._read_body(response, deadline)
        except requests.RequestException as error:
            # The message may show the query, but never the form, which may hold a password.
            raise _RetryableFailure(f"{type(error).__name__} at {url.partition('?')[0]}") from error
        if response.status_code in _RETRYABLE_STATUSES:
            body_start = body[:_MAX_SHOWN_BYTES].decode(errors="replace").strip()
            message = f"status {response.status_code} {body_start}".strip()
            raise _RetryableFailure(message, self._retry_after_s(response_headers))
        return ProviderAnswer(response.status_code, body, response_headers)

    def _read_body(self, response: requests.Response, deadline: float) -> bytes:
        chunks, size = [], 0
        for chunk in response.iter_content(_CHUNK_BYTES):
            chunks.append(chunk)
            size += len(chunk)
            if size > self._max_bytes:
                raise ProviderRefused(
                    f"The answer of {self._provider} has more than {self._max_bytes:,} bytes.",
                    hint="Query a smaller group, or raise max_download_mb.",
                )
            # The read timeout applies to each chunk, so a slow stream of chunks needs this deadline.
            if self._clock.monotonic() > deadline:
                raise _RetryableFailure("the answer was not complete in time")
        return b"".join(chunks)

    def _retry_after_s(self, headers: Mapping[str, str]) -> float | None:
        """Return the seconds of `Retry-After`, a number or a date; None if it is missing or invalid."""
        header_value = headers.get("retry-after", "").strip()
        if header_value.isascii() and header_value.isdigit():
            return float(header_value)
        try:
            return (
                max(0.0, parsedate_to_datetime(header_value).timestamp() - self._clock.wall_time())
                if header_value
                else None
            )
        except (ValueError, OverflowError):  # no date, or one that no datetime can hold
            return None
