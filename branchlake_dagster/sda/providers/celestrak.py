"""Download GP catalogs from CelesTrak, within its usage policy.

CelesTrak's data change at most every two hours, so queries are not repeated sooner, and repeated queries are
conditional. CelesTrak refuses more frequent queries with 403 and blocks a client after a hundred errors
(celestrak.org/usage-policy.php and the notes to gp.php).
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode

from pydantic import Field

from branchlake_dagster.sda.providers.download import (
    NOT_MODIFIED,
    Downloader,
    ProviderAnswer,
    ProviderClock,
    RetryRule,
)
from branchlake_dagster.sda.providers.errors import ProviderRefused
from branchlake_dagster.sda.providers.kept import AnswerCache, CachedAnswer, lock_file
from branchlake_dagster.sda.providers.pulled import GpProvider, Pull, is_catalog, utc_datetime

_NOT_UPDATED = "has not updated since your last"
_OK, _FORBIDDEN = 200, 403
_MAX_SHOWN_BYTES = 160


class CelesTrak(GpProvider):
    """GP element sets of a CelesTrak group (``active``, ``stations``, …).

    Answers are cached in `cache_dir` for `keep_s` seconds, also across restarts. Later queries are
    conditional. All limits are settings because the provider's rules change.
    """

    cache_dir: str
    group: str = "active"
    format: str = Field("csv", description="csv, json, xml, kvn, tle or 3le.")
    url: str = "https://celestrak.org/NORAD/elements/gp.php"
    # Less than the two hours of the schedule `gp_pull`, whose ticks come some seconds early or late.
    keep_s: float = Field(7_000.0, ge=0, description="Minimum time between two requests, seconds.")
    connect_s: float = Field(3.0, gt=0)
    read_s: float = Field(15.0, gt=0)
    tries: int = Field(4, ge=1)
    give_up_s: float = Field(
        45.0, gt=0, description="No attempt starts later, seconds; a schedule's tick ends after a minute."
    )
    max_download_mb: int = Field(256, ge=1)

    def pull(self, clock: ProviderClock | None = None) -> Pull:
        """Return the group's newest elements, from the cache or from the provider.

        Raises:
            ProviderRefused: the query is wrong, the provider refuses it, or the answer has no data.
            ProviderUnavailable: the provider gave no complete answer in any attempt.

        """
        clock = clock or ProviderClock()
        query = f"{self.url}?{urlencode({'GROUP': self.group, 'FORMAT': self.format})}"
        cache = AnswerCache(Path(self.cache_dir) / "celestrak")
        # Of two processes that pull at the same time, only the first one sends a request.
        with lock_file(cache.answer_path(query)):
            cached_answer = self._load_answer(query, cache, clock)
        return Pull(
            "celestrak", self.group, self.format, cached_answer.body, utc_datetime(cached_answer.fetched_at)
        )

    def _load_answer(self, query: str, cache: AnswerCache, clock: ProviderClock) -> CachedAnswer:
        cached_answer = cache.get(query)
        # A request time in the future comes from a wrong clock; the answer would stay cached for too long.
        if cached_answer is not None and 0 <= clock.wall_time() - cached_answer.asked_at < self.keep_s:
            return cached_answer
        downloader = Downloader(
            "CelesTrak",
            connect_s=self.connect_s,
            read_s=self.read_s,
            max_bytes=self.max_download_mb << 20,
            retry=RetryRule(tries=self.tries, give_up_s=self.give_up_s),
            clock=clock,
        )
        # The next tick of a schedule comes as long after this request as its interval is.
        asked_at = clock.wall_time()
        answer = downloader.request(
            query, headers=cached_answer.conditional_headers() if cached_answer else {}
        )
        if cached_answer is not None and _is_unchanged(answer):
            return cache.mark_unchanged(query, cached_answer, asked_at)
        if answer.status != _OK or not is_catalog(answer.body, self.format):
            body_start = answer.body[:_MAX_SHOWN_BYTES].decode(errors="replace").strip() or "nothing"
            raise ProviderRefused(
                f"CelesTrak answered GROUP={self.group} with status {answer.status}: {body_start}.",
                hint="Check the group and the limits: celestrak.org/NORAD/documentation/gp-data-formats.php.",
            )
        new_answer = CachedAnswer(
            answer.body,
            clock.wall_time(),
            asked_at,
            answer.headers.get("etag"),
            answer.headers.get("last-modified"),
        )
        return cache.update(query, cached_answer, new_answer)


def _is_unchanged(answer: ProviderAnswer) -> bool:
    """Return whether the answer is 304 or CelesTrak's own notice of unchanged data."""
    has_notice = _NOT_UPDATED.encode() in answer.body
    return answer.status == NOT_MODIFIED or (answer.status in (_OK, _FORBIDDEN) and has_notice)
