"""CelesTrak's GP queries.

Its rules (celestrak.org/usage-policy.php and the notes to gp.php): data change every two hours at most, so
no query is made more often; what is known is asked for conditionally; who asks more often is refused with 403
and after a hundred errors blocked.
"""

from __future__ import annotations

import re
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
from branchlake_dagster.sda.providers.pulled import GpProvider, Pull, utc_datetime

_NOT_UPDATED = "has not updated since your last"
_NO_DATA = re.compile(rb"\s*(Invalid query|No GP data found|GP data|<!DOCTYPE html|<html)", re.IGNORECASE)
_OK, _FORBIDDEN = 200, 403
_MAX_SHOWN_BYTES = 160


class CelesTrak(GpProvider):
    """GP element sets of a CelesTrak group (``active``, ``stations``, …).

    Answers are kept in `cache_dir` for `keep_s` seconds, also across restarts; then they are asked for
    again conditionally. Each fixed number is a setting because the provider's rules change.
    """

    cache_dir: str
    group: str = "active"
    format: str = Field("csv", description="csv, json, xml, kvn, tle or 3le.")
    url: str = "https://celestrak.org/NORAD/elements/gp.php"
    keep_s: float = Field(7_200.0, ge=0, description="Shortest time between two questions, seconds.")
    connect_s: float = Field(3.0, gt=0)
    read_s: float = Field(15.0, gt=0)
    tries: int = Field(4, ge=1)
    give_up_s: float = Field(45.0, gt=0, description="A schedule's tick ends after a minute.")
    max_download_mb: int = Field(256, ge=1)

    def pull(self, clock: ProviderClock | None = None) -> Pull:
        """The group's newest elements, from the provider or from what is kept.

        Raises:
            ProviderRefused: the query is wrong, or the provider does not want to be asked.
            ProviderUnavailable: it gave no whole answer, and nothing was kept.

        """
        clock = clock or ProviderClock()
        query = f"{self.url}?{urlencode({'GROUP': self.group, 'FORMAT': self.format})}"
        cache = AnswerCache(Path(self.cache_dir) / "celestrak", clock)
        # Two processes that pull at once are one question.
        with lock_file(cache.answer_path(query)):
            cached_answer = self._load_answer(query, cache, clock)
        return Pull(
            "celestrak", self.group, self.format, cached_answer.body, utc_datetime(cached_answer.fetched_at)
        )

    def _load_answer(self, query: str, cache: AnswerCache, around: ProviderClock) -> CachedAnswer:
        cached_answer = cache.get(query)
        # An answer of the future is of a clock that was wrong: it must not be kept for ever.
        if cached_answer is not None and 0 <= around.wall_time() - cached_answer.asked_at < self.keep_s:
            return cached_answer
        downloader = Downloader(
            "CelesTrak",
            connect_s=self.connect_s,
            read_s=self.read_s,
            max_bytes=self.max_download_mb << 20,
            retry=RetryRule(tries=self.tries, give_up_s=self.give_up_s),
            clock=around,
        )
        answer = downloader.request(
            query, headers=cached_answer.conditional_headers() if cached_answer else {}
        )
        if cached_answer is not None and _is_unchanged(answer):
            return cache.mark_unchanged(query, cached_answer)
        if answer.status != _OK or not answer.body.strip() or _NO_DATA.match(answer.body):
            body_start = answer.body[:_MAX_SHOWN_BYTES].decode(errors="replace").strip() or "nothing"
            raise ProviderRefused(
                f"CelesTrak answered {answer.status} to GROUP={self.group}: {body_start}.",
                hint="See celestrak.org/NORAD/documentation/gp-data-formats.php for groups and limits.",
            )
        now = around.wall_time()
        new_answer = CachedAnswer(
            answer.body, now, now, answer.headers.get("etag"), answer.headers.get("last-modified")
        )
        return cache.store(query, new_answer)


def _is_unchanged(answer: ProviderAnswer) -> bool:
    """304, or CelesTrak's own word for it."""
    has_notice = _NOT_UPDATED.encode() in answer.body
    return answer.status == NOT_MODIFIED or (answer.status in (_OK, _FORBIDDEN) and has_notice)
