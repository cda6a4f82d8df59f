"""The HTTP source: it polls pages of JSON, starting from a cursor that is stored with the records.

A page is a JSON array of objects, requested as ``GET url?since=<cursor>&limit=<n>&wait_ms=<ms>``. It has the
items whose cursor field, an integer, is after ``since``, in the order of that field. Servers differ in
whether ``since`` itself is included, and items may appear late. Therefore

- a pause follows each page without new items, even if the server ignores ``wait_ms``;
- a look back regularly requests the items up to ``look_back`` before the cursor again;
- recent items are remembered by a digest of their bytes and are not handed over again.

Each record carries a cursor from which all later items can be requested again. It is the cursor of the
request, and only for the last record of a page the new cursor. So a restart from the cursor of the sink's
last record loses nothing, and items that arrive twice have the same key.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from branchlake_dagster.errors import ConfigurationError, without_credentials
from branchlake_dagster.extras import require_modules
from branchlake_dagster.receivers.records import Buffer, Counts, Record, ResumeState, digest_value

if TYPE_CHECKING:
    import aiohttp

_FIRST_PAUSE_S, _ALARMING_FAILURES = 0.5, 3
_JSON_WHITESPACE = " \t\r\n"
_LONGEST_NUMBER = 40
_URL_SCHEMES = ("http://", "https://")


def _is_http_url(url: str) -> bool:
    """Return whether the text is an HTTP URL with a host and a valid port."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for a port that is not a number of 16 bits
    except ValueError:
        return False
    return url.startswith(_URL_SCHEMES) and bool(parts.hostname)


@dataclass(frozen=True)
class HttpConfig:
    """The options of an HTTP source.

    Args:
        url: The URL without ``since``, ``limit`` and ``wait_ms``, which are added.
        key_field: The field of an item that becomes the record's key.
        cursor_field: The integer field to which ``since`` refers.
        start: The first cursor, used if the sink has no cursor yet.
        limit: The maximum number of items on a page.
        wait_ms: The time that the server may wait for a new item; with 0 it answers at once.
        pause_s: The pause between a page without new items and the next request.
        look_back: The distance before the cursor in which late items are requested again, in the unit of the
            cursor; 0 turns it off. It must be larger than the greatest delay of an item, plus
            `look_back_every_s`, plus the time of a request.
        look_back_every_s: The interval between two look backs.
        most_ahead_ns: An item whose cursor field is further ahead of the clock (nanoseconds) does not move
            the cursor, because one bad item would hide all later ones. None if the field is not a time.
        timeout_s: The timeout of an answer, in addition to ``wait_ms``.
        most_page_bytes: A larger page is rejected.
        most_pause_s: The longest pause between two attempts, however often they fail.
        most_retry_after_s: The longest ``Retry-After`` that is obeyed.
        remembered_items: The number of items that are remembered, to recognize duplicates.
        headers: Headers of each request. They may contain a token, so they are sent to ``url`` only: with
            headers, redirects are not followed.

    """

    url: str
    key_field: str = "obs_id"
    cursor_field: str = "timestamp_ns"
    start: int = 0
    limit: int = 5_000
    wait_ms: int = 5_000
    pause_s: float = 1.0
    look_back: int = 90_000_000_000
    look_back_every_s: float = 15.0
    most_ahead_ns: int | None = 3_600_000_000_000
    timeout_s: float = 10.0
    most_page_bytes: int = 32 * 1024 * 1024
    most_pause_s: float = 30.0
    most_retry_after_s: float = 300.0
    remembered_items: int = 200_000
    headers: tuple[tuple[str, str], ...] = ()


class _InvalidPageError(Exception):
    """The answer is not a valid page.

    `kind` is the name of the count of such failures. `after_s` is the number of seconds to wait before the
    next request, None for the usual pause.
    """

    def __init__(self, kind: str, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind, self.after_s = kind, after_s


class HttpSource:
    """The source that polls one server."""

    protocol = "http"
    resumes = True

    def __init__(
        self,
        config: HttpConfig,
        buffer: Buffer,
        counts: Counts,
        *,
        now_ns: Callable[[], int] = time.time_ns,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        require_modules("receive", "aiohttp", needed_by="A receiver over HTTP")
        if not _is_http_url(config.url):
            raise ConfigurationError(
                f"{without_credentials(config.url)!r} is not an HTTP URL.",
                hint="Use a URL that begins with http:// or https:// and a host, and has a port below 65536.",
                reason="url",
                subject=without_credentials(config.url),
            )
        self.config, self.trouble, self._stuck_message = config, "", ""
        self.cursor = config.start
        self._look_back_range: tuple[int, int] | None = None
        self._buffer, self._counts, self._now_ns, self._sleep = buffer, counts, now_ns, sleep
        self._rng = rng or random.Random()  # noqa: S311 - only spreads attempts over time
        self._remembered_values: OrderedDict[bytes, None] = OrderedDict()
        self.task: asyncio.Task[None] | None = None
        self._is_filling_buffer = False
        self._source = without_credentials(config.url).encode()

    @property
    def address(self) -> str:
        """The URL of the server, without credentials."""
        return self._source.decode()

    def resume(self, resume_state: ResumeState) -> None:
        """Continue from the sink's last cursor, and remember its last values, which are not stored twice.

        Raises ConfigurationError if the cursor is not an integer.
        """
        if resume_state.cursor is not None:
            try:
                self.cursor = int(resume_state.cursor)
            except ValueError:
                raise ConfigurationError(
                    f"The last record has the cursor {resume_state.cursor!r}, which is not an integer.",
                    hint="The topic belongs to another kind of receiver. Use another topic.",
                    reason="cursor",
                    subject=repr(resume_state.cursor),
                ) from None
        for value_digest in resume_state.value_digests:
            self._remember(value_digest)

    async def start(self) -> None:
        """Start polling in a task."""
        self.task = asyncio.get_running_loop().create_task(self._poll_forever())

    async def stop(self) -> None:
        """Stop polling. A page that is being read is dropped; the next receiver requests it again."""
        if self.task is None:
            return
        # Records that are entering the buffer may finish if the buffer has capacity within half a second.
        for _ in range(10):
            if not self._is_filling_buffer:
                break
            await asyncio.sleep(0.05)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.task = None

    def update_counts(self) -> None:
        """Do nothing, because the operating system keeps no counts for HTTP."""

    async def _poll_forever(self) -> None:
        import aiohttp

        failures, pause_s = 0, _FIRST_PAUSE_S
        looked_back = asyncio.get_running_loop().time()
        async with aiohttp.ClientSession(headers=dict(self.config.headers)) as session:
            while True:
                due = asyncio.get_running_loop().time() - looked_back >= self.config.look_back_every_s
                try:
                    # After a failure the interrupted look back continues, and new items are read before the
                    # next look back. If it restarted each time, new items might never be read.
                    if self.config.look_back and due and not failures and self._look_back_range is None:
                        self._look_back_range = (self.cursor - self.config.look_back, self.cursor)
                        self._counts.events["looks_back"] += 1
                        looked_back = asyncio.get_running_loop().time()
                    await self._look_back(session)
                    new, _ = await self._read_page(session, self.cursor, self.config.wait_ms)
                except _InvalidPageError as error:
                    failures += 1
                    self._counts.events[f"requests_{error.kind}"] += 1
                    self.trouble = f"{error} ({failures} in a row)" if failures >= _ALARMING_FAILURES else ""
                    # Decorrelated jitter spreads the attempts of many receivers.
                    pause_s = min(self.config.most_pause_s, self._rng.uniform(_FIRST_PAUSE_S, 3 * pause_s))
                    await self._sleep(pause_s if error.after_s is None else error.after_s)
                    continue
                failures, pause_s, self.trouble = 0, _FIRST_PAUSE_S, self._stuck_message
                if not new:
                    await self._sleep(self.config.pause_s)

    async def _look_back(self, session: aiohttp.ClientSession) -> None:
        """Request the items before the cursor again, to receive items that appeared late.

        The cursor never moves back. After a failure the next call continues where this one stopped.
        """
        while self._look_back_range is not None:
            since, end = self._look_back_range
            _, highest = await self._read_page(session, since, 0)
            more = highest is not None and since < highest < end
            self._look_back_range = (highest, end) if more and highest is not None else None

    async def _read_page(
        self, session: aiohttp.ClientSession, since: int, wait_ms: int
    ) -> tuple[int, int | None]:
        """Read one page, put its new items into the buffer, and move the cursor to the page's highest cursor.

        Returns the number of new items, and the highest cursor on the page, None without one. Raises
        _InvalidPageError.
        """
        body = await self._get(session, since, wait_ms)
        items = list(self._parse_items(body))
        self._counts.events["requests_ok"] += 1
        now_ns = self._now_ns()
        highest_credible = None if self.config.most_ahead_ns is None else now_ns + self.config.most_ahead_ns
        records: list[Record] = []
        cursor, highest = self.cursor, None
        previous_cursor, self._stuck_message = since, ""
        for raw, item in items:
            item_cursor = self._find_cursor(item)
            if item_cursor is not None and highest_credible is not None and item_cursor > highest_credible:
                self._counts.events["cursors_ahead"] += 1
                item_cursor = None
            if item_cursor is not None:
                self._counts.events["out_of_order"] += item_cursor < previous_cursor
                previous_cursor = item_cursor
                highest = item_cursor if highest is None else max(highest, item_cursor)
                cursor = max(cursor, item_cursor)
            key = self._record_key(item, raw)
            value_digest = digest_value(raw)
            if value_digest in self._remembered_values:
                self._counts.events["known_already"] += 1
                continue
            self._remember(value_digest)
            records.append(Record(raw, key, now_ns, self._source, b"%d" % self.cursor))
        if records:
            records[-1] = records[-1]._replace(cursor=b"%d" % cursor)
            self._is_filling_buffer = True
            try:
                await self._buffer.put(records)
            finally:
                self._is_filling_buffer = False
        elif len(items) >= self.config.limit and wait_ms == self.config.wait_ms and cursor == self.cursor:
            self._counts.events["stuck_pages"] += 1
            self._stuck_message = (
                f"{self.address} has more than {self.config.limit} items with the same"
                f" {self.config.cursor_field}, so later items cannot be read. Raise the limit."
            )
        self.cursor = cursor
        return len(records), highest

    async def _get(self, session: aiohttp.ClientSession, since: int, wait_ms: int) -> bytes:
        import aiohttp

        query = {"since": str(since), "limit": str(self.config.limit), "wait_ms": str(wait_ms)}
        timeout = aiohttp.ClientTimeout(total=self.config.timeout_s + wait_ms / 1_000)
        try:
            async with session.get(
                self.config.url, params=query, timeout=timeout, allow_redirects=not self.config.headers
            ) as answer:
                if answer.status != 200:
                    raise self._to_page_error(answer)
                body = bytearray()
                async for chunk in answer.content.iter_chunked(64 * 1024):
                    body += chunk
                    if len(body) > self.config.most_page_bytes:
                        raise _InvalidPageError(
                            "too_large", f"{self.address} sent more than {self.config.most_page_bytes} bytes"
                        )
                return bytes(body)
        except TimeoutError:
            raise _InvalidPageError(
                "timeout", f"{self.address} did not answer in {timeout.total} s"
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _InvalidPageError("connection", f"{self.address} cannot be reached: {error}") from error

    def _to_page_error(self, answer: aiohttp.ClientResponse) -> _InvalidPageError:
        kind = "throttled" if answer.status == 429 else "server_error" if answer.status >= 500 else "refused"
        retry_after_s = self._parse_retry_after(answer.headers.get("Retry-After"))
        # A request that was refused will be refused again, so wait longer.
        default_wait_s = self.config.most_pause_s if kind == "refused" else None
        message = f"{self.address} answered {answer.status}"
        if 300 <= answer.status < 400 and (location := answer.headers.get("Location")):
            message += (
                f" and refers to {without_credentials(location)}. Headers go to the configured URL only:"
                " if you trust this address, configure it."
            )
        return _InvalidPageError(
            kind,
            message,
            default_wait_s if retry_after_s is None else retry_after_s,
        )

    def _parse_retry_after(self, header: str | None) -> float | None:
        """Parse a ``Retry-After`` header, a number of seconds or a date (RFC 9110).

        Returns the seconds to wait, at most `most_retry_after_s`, or None without a valid header.
        """
        if header is None:
            return None
        try:
            seconds = float(header)
        except ValueError:
            try:
                until = parsedate_to_datetime(header)
            except (ValueError, OverflowError):  # no date, or one that no datetime can hold
                return None
            until = until if until.tzinfo else until.replace(tzinfo=UTC)
            seconds = (until - datetime.fromtimestamp(self._now_ns() / 1e9, UTC)).total_seconds()
        if not seconds >= 0:
            return None
        return min(seconds, self.config.most_retry_after_s)

    def _parse_items(self, body: bytes) -> Iterator[tuple[bytes, Any]]:
        """Yield the items of a page, a JSON array: each as its original bytes and as the decoded value.

        `body` is the body of the answer in UTF-8. Raises _InvalidPageError if it is not a JSON array,
        possibly after some items were yielded.
        """
        try:
            page_text = body.decode()
            position = _skip_whitespace(page_text, 0)
            if page_text[position : position + 1] != "[":
                raise ValueError("it is not an array")
            position = _skip_whitespace(page_text, position + 1)
            while page_text[position : position + 1] != "]":
                item, end = _DECODER.raw_decode(page_text, position)
                yield page_text[position:end].encode(), item
                position = _skip_whitespace(page_text, end)
                if page_text[position : position + 1] == ",":
                    position = _skip_whitespace(page_text, position + 1)
                    if page_text[position : position + 1] == "]":
                        raise ValueError("an element is missing")
                elif page_text[position : position + 1] != "]":
                    raise ValueError("a comma is missing")
            if _skip_whitespace(page_text, position + 1) != len(page_text):
                raise ValueError("something follows the array")
        except (ValueError, RecursionError) as error:
            raise _InvalidPageError("malformed", f"{self.address} sent an invalid page: {error}") from error

    def _find_cursor(self, item: Any) -> int | None:
        value = item.get(self.config.cursor_field) if isinstance(item, dict) else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def _record_key(self, item: Any, raw: bytes) -> bytes:
        value = item.get(self.config.key_field) if isinstance(item, dict) else None
        if isinstance(value, str) and value:
            # JSON may contain lone surrogates, which UTF-8 cannot encode.
            return value.encode(errors="replace")
        return b"sha256:" + hashlib.sha256(raw).hexdigest().encode()

    def _remember(self, value_digest: bytes) -> None:
        self._remembered_values[value_digest] = None
        while len(self._remembered_values) > self.config.remembered_items:
            self._remembered_values.popitem(last=False)


def _parse_integer(digits: str) -> int | float:
    # Python refuses to parse very long integers; that must not make the whole page invalid.
    return int(digits) if len(digits) <= _LONGEST_NUMBER else float("inf")


_DECODER = json.JSONDecoder(parse_int=_parse_integer)


def _skip_whitespace(page_text: str, position: int) -> int:
    while position < len(page_text) and page_text[position] in _JSON_WHITESPACE:
        position += 1
    return position
