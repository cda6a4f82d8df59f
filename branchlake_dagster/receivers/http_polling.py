"""Pages of JSON over HTTP, asked for again and again from a cursor that is kept with the records.

A page is a JSON array of objects, asked for as ``GET url?since=<cursor>&limit=<n>&wait_ms=<ms>``: those
whose cursor field, an integer, lies after ``since``, in its order. Nobody promises whether *after* includes
``since``, nor that nothing comes late; so

- a page with nothing new is followed by a pause, whatever the server did with ``wait_ms``;
- now and then a look back asks again for what lies up to ``look_back`` before the cursor;
- what was handed over lately is known, byte by byte, and not handed over again.

Each record carries the cursor from which everything after it would be had again: that of the request, and
only the last one of a page the new one. So wherever the sink's records end, asking from the last cursor
loses nothing; what comes twice has the same key.
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

from branchlake_dagster.errors import ConfigurationError, without_credentials
from branchlake_dagster.extras import require
from branchlake_dagster.receivers.records import Buffer, Counts, Record, Resumed, digest

if TYPE_CHECKING:
    import aiohttp

_FIRST_PAUSE_S, _WORST = 0.5, 3
_SPACE = " \t\r\n"
_LONGEST_NUMBER = 40
_KINDS = ("http://", "https://")


@dataclass(frozen=True)
class HttpConfig:
    """Where pages come from.

    Args:
        url: without ``since``, ``limit`` and ``wait_ms``, which are added.
        key_field: the field of an item that names it.
        cursor_field: the integer field that ``since`` means.
        start: the first cursor, where the sink has none.
        limit: how many items a page may have.
        wait_ms: how long the server may wait for something new; 0: it answers at once.
        pause_s: between a page with nothing new and the next request.
        look_back: how far before the cursor late items are looked for, in its unit; 0: never. More than they
            may be late, by `look_back_every_s` and what a request may take.
        look_back_every_s: how often.
        most_ahead: an item whose cursor field is that far ahead of the clock (nanoseconds) does not move the
            cursor: one bad item must not hide all later ones. None: the field is no time.
        timeout_s: for an answer, beyond ``wait_ms``.
        most_page_bytes: a larger page is no page.
        most_pause_s: between two attempts, however often they fail.
        most_retry_after_s: a longer ``Retry-After`` is not believed.
        known: how many items are remembered.
        headers: sent with each request; may hold a token.

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
    most_ahead: int | None = 3_600_000_000_000
    timeout_s: float = 10.0
    most_page_bytes: int = 32 * 1024 * 1024
    most_pause_s: float = 30.0
    most_retry_after_s: float = 300.0
    known: int = 200_000
    headers: tuple[tuple[str, str], ...] = ()


class _NoPageError(Exception):
    """The answer is no page; the text says why, `after_s` when to ask again if the server said so."""

    def __init__(self, kind: str, text: str, after_s: float | None = None) -> None:
        super().__init__(text)
        self.kind, self.after_s = kind, after_s


class HttpSource:
    """One server's pages."""

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
        require("receive", "aiohttp", wanted_by="A receiver over HTTP")
        if not config.url.startswith(_KINDS):
            raise ConfigurationError(
                f"{without_credentials(config.url)!r} is no URL.",
                hint="It begins with http:// or https://.",
                reason="url",
                subject=config.url,
            )
        self.config, self.trouble, self._stuck = config, "", ""
        self.cursor = config.start
        self._behind: tuple[int, int] | None = None
        self._buffer, self._counts, self._now_ns, self._sleep = buffer, counts, now_ns, sleep
        self._rng = rng or random.Random()  # noqa: S311 - it spreads attempts
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self.task: asyncio.Task[None] | None = None
        self._putting = False
        self._source = without_credentials(config.url).encode()

    @property
    def address(self) -> str:
        """The server."""
        return self._source.decode()

    def resume(self, resumed: Resumed) -> None:
        """Continue from what the sink has. Raises ConfigurationError for a cursor of another kind."""
        if resumed.cursor is not None:
            try:
                self.cursor = int(resumed.cursor)
            except ValueError:
                raise ConfigurationError(
                    f"The last record has the cursor {resumed.cursor!r}, which is no integer.",
                    hint="The topic belongs to another receiver; take another one.",
                    reason="cursor",
                    subject=repr(resumed.cursor),
                ) from None
        for one in resumed.known:
            self._remember(one)

    async def start(self) -> None:
        """Begin to ask."""
        self.task = asyncio.get_running_loop().create_task(self._ask_for_ever())

    async def stop(self) -> None:
        """Ask no more. A page that is being read is left to the next receiver."""
        if self.task is None:
            return
        # A page on its way into the buffer is finished if there is room soon.
        for _ in range(10):
            if not self._putting:
                break
            await asyncio.sleep(0.05)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.task = None

    def look(self) -> None:
        """Nothing to ask for."""

    async def _ask_for_ever(self) -> None:
        import aiohttp

        failures, pause_s = 0, _FIRST_PAUSE_S
        looked_back = asyncio.get_running_loop().time()
        async with aiohttp.ClientSession(headers=dict(self.config.headers)) as session:
            while True:
                due = asyncio.get_running_loop().time() - looked_back >= self.config.look_back_every_s
                try:
                    # After a failure the same is asked for again: an interrupted look back goes on, and new
                    # items are had before the next one. Begun anew each time, it would let nothing through.
                    if self.config.look_back and due and not failures and self._behind is None:
                        self._behind = (self.cursor - self.config.look_back, self.cursor)
                        self._counts.events["looks_back"] += 1
                        looked_back = asyncio.get_running_loop().time()
                    await self._look_back(session)
                    new, _ = await self._page(session, self.cursor, self.config.wait_ms)
                except _NoPageError as error:
                    failures += 1
                    self._counts.events[f"requests_{error.kind}"] += 1
                    self.trouble = f"{error} ({failures} in a row)" if failures >= _WORST else ""
                    # Decorrelated jitter: attempts of many receivers spread.
                    pause_s = min(self.config.most_pause_s, self._rng.uniform(_FIRST_PAUSE_S, 3 * pause_s))
                    await self._sleep(pause_s if error.after_s is None else error.after_s)
                    continue
                failures, pause_s, self.trouble = 0, _FIRST_PAUSE_S, self._stuck
                if not new:
                    await self._sleep(self.config.pause_s)

    async def _look_back(self, session: aiohttp.ClientSession) -> None:
        """Ask again for what lies before the cursor; what is late comes in without moving it.

        A failure on the way is no reason to begin anew.
        """
        while self._behind is not None:
            since, end = self._behind
            _, highest = await self._page(session, since, 0)
            more = highest is not None and since < highest < end
            self._behind = (highest, end) if more and highest is not None else None

    async def _page(self, session: aiohttp.ClientSession, since: int, wait_ms: int) -> tuple[int, int | None]:
        """Ask once and hand on what is new: how much, and the highest cursor field on the page."""
        body = await self._get(session, since, wait_ms)
        items = list(self._items(body))
        self._counts.events["requests_ok"] += 1
        now = self._now_ns()
        limit = None if self.config.most_ahead is None else now + self.config.most_ahead
        records: list[Record] = []
        cursor, highest = self.cursor, None
        before, self._stuck = since, ""
        for raw, item in items:
            at = self._cursor_of(item)
            if at is not None and limit is not None and at > limit:
                self._counts.events["cursors_ahead"] += 1
                at = None
            if at is not None:
                self._counts.events["out_of_order"] += at < before
                before = at
                highest = at if highest is None else max(highest, at)
                cursor = max(cursor, at)
            key = self._key_of(item, raw)
            known = digest(raw)
            if known in self._known:
                self._counts.events["known_already"] += 1
                continue
            self._remember(known)
            records.append(Record(raw, key, now, self._source, b"%d" % self.cursor))
        if records:
            records[-1] = records[-1]._replace(cursor=b"%d" % cursor)
            self._putting = True
            try:
                await self._buffer.put(records)
            finally:
                self._putting = False
        elif len(items) >= self.config.limit and wait_ms == self.config.wait_ms and cursor == self.cursor:
            self._counts.events["stuck_pages"] += 1
            self._stuck = (
                f"{self.address} has more than {self.config.limit} items with one {self.config.cursor_field}:"
                " nothing after them is had. Raise the limit."
            )
        self.cursor = cursor
        return len(records), highest

    async def _get(self, session: aiohttp.ClientSession, since: int, wait_ms: int) -> bytes:
        import aiohttp

        asked = {"since": str(since), "limit": str(self.config.limit), "wait_ms": str(wait_ms)}
        timeout = aiohttp.ClientTimeout(total=self.config.timeout_s + wait_ms / 1_000)
        try:
            async with session.get(self.config.url, params=asked, timeout=timeout) as answer:
                if answer.status != 200:
                    raise self._refused(answer)
                body = bytearray()
                async for chunk in answer.content.iter_chunked(64 * 1024):
                    body += chunk
                    if len(body) > self.config.most_page_bytes:
                        raise _NoPageError(
                            "too_large", f"{self.address} sent more than {self.config.most_page_bytes} bytes"
                        )
                return bytes(body)
        except TimeoutError:
            raise _NoPageError("timeout", f"{self.address} did not answer in {timeout.total} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _NoPageError("connection", f"{self.address} cannot be reached: {error}") from error

    def _refused(self, answer: aiohttp.ClientResponse) -> _NoPageError:
        kind = "throttled" if answer.status == 429 else "server_error" if answer.status >= 500 else "refused"
        after = self._retry_after(answer.headers.get("Retry-After"))
        # Asking again at once helps nobody where the request itself is refused.
        wait = self.config.most_pause_s if kind == "refused" else None
        return _NoPageError(
            kind, f"{self.address} answered {answer.status}", wait if after is None else after
        )

    def _retry_after(self, told: str | None) -> float | None:
        """Seconds that a server asks for, as a number or as a time (RFC 9110)."""
        if told is None:
            return None
        try:
            seconds = float(told)
        except ValueError:
            try:
                until = parsedate_to_datetime(told)
            except ValueError:
                return None
            until = until if until.tzinfo else until.replace(tzinfo=UTC)
            seconds = (until - datetime.fromtimestamp(self._now_ns() / 1e9, UTC)).total_seconds()
        if not seconds >= 0:
            return None
        return min(seconds, self.config.most_retry_after_s)

    def _items(self, body: bytes) -> Iterator[tuple[bytes, Any]]:
        """The elements of a page as they were sent, and as values. Raises _NoPageError for no page."""
        try:
            text = body.decode()
            at = _after_space(text, 0)
            if text[at : at + 1] != "[":
                raise ValueError("it is no array")
            at = _after_space(text, at + 1)
            while text[at : at + 1] != "]":
                item, end = _DECODER.raw_decode(text, at)
                yield text[at:end].encode(), item
                at = _after_space(text, end)
                if text[at : at + 1] == ",":
                    at = _after_space(text, at + 1)
                    if text[at : at + 1] == "]":
                        raise ValueError("an element is missing")
                elif text[at : at + 1] != "]":
                    raise ValueError("a comma is missing")
            if _after_space(text, at + 1) != len(text):
                raise ValueError("something follows the array")
        except (ValueError, RecursionError) as error:
            raise _NoPageError("malformed", f"{self.address} sent no page: {error}") from error

    def _cursor_of(self, item: Any) -> int | None:
        found = item.get(self.config.cursor_field) if isinstance(item, dict) else None
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def _key_of(self, item: Any, raw: bytes) -> bytes:
        found = item.get(self.config.key_field) if isinstance(item, dict) else None
        if isinstance(found, str) and found:
            # Lone surrogates are legal in JSON and not in UTF-8.
            return found.encode(errors="replace")
        return b"sha256:" + hashlib.sha256(raw).hexdigest().encode()

    def _remember(self, known: bytes) -> None:
        self._known[known] = None
        while len(self._known) > self.config.known:
            self._known.popitem(last=False)


def _number(text: str) -> int | float:
    # Python refuses very long integers; a page must not be refused for one.
    return int(text) if len(text) <= _LONGEST_NUMBER else float("inf")


_DECODER = json.JSONDecoder(parse_int=_number)


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at
