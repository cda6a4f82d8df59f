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
    Answer,
    Downloader,
    RetryRule,
    Surroundings,
)
from branchlake_dagster.sda.providers.errors import ProviderRefused
from branchlake_dagster.sda.providers.kept import AnswerCache, Entry, locked
from branchlake_dagster.sda.providers.pulled import GpProvider, Pull, utc

_NOT_UPDATED = "has not updated since your last"
_NO_DATA = re.compile(rb"\s*(Invalid query|No GP data found|GP data|<!DOCTYPE html|<html)", re.IGNORECASE)
_OK, _FORBIDDEN = 200, 403
_SHOWN = 160


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

    def pull(self, around: Surroundings | None = None) -> Pull:
        """The group's newest elements, from the provider or from what is kept.

        Raises:
            ProviderRefused: the query is wrong, or the provider does not want to be asked.
            ProviderUnavailable: it gave no whole answer, and nothing was kept.

        """
        around = around or Surroundings()
        query = f"{self.url}?{urlencode({'GROUP': self.group, 'FORMAT': self.format})}"
        cache = AnswerCache(Path(self.cache_dir) / "celestrak", around)
        # Two processes that pull at once are one question.
        with locked(cache.path(query)):
            entry = self._entry(query, cache, around)
        return Pull("celestrak", self.group, self.format, entry.body, utc(entry.fetched_at))

    def _entry(self, query: str, cache: AnswerCache, around: Surroundings) -> Entry:
        known = cache.get(query)
        # An answer of the future is of a clock that was wrong: it must not be kept for ever.
        if known is not None and 0 <= around.wall() - known.asked_at < self.keep_s:
            return known
        downloader = Downloader(
            "CelesTrak",
            connect_s=self.connect_s,
            read_s=self.read_s,
            max_bytes=self.max_download_mb << 20,
            retry=RetryRule(tries=self.tries, give_up_s=self.give_up_s),
            around=around,
        )
        answer = downloader.ask(query, headers=known.conditions() if known else {})
        if known is not None and _is_unchanged(answer):
            return cache.still_true(query, known)
        if answer.status != _OK or not answer.body.strip() or _NO_DATA.match(answer.body):
            told = answer.body[:_SHOWN].decode(errors="replace").strip() or "nothing"
            raise ProviderRefused(
                f"CelesTrak answered {answer.status} to GROUP={self.group}: {told}.",
                hint="See celestrak.org/NORAD/documentation/gp-data-formats.php for groups and limits.",
            )
        now = around.wall()
        made = Entry(answer.body, now, now, answer.headers.get("etag"), answer.headers.get("last-modified"))
        return cache.put(query, made)


def _is_unchanged(answer: Answer) -> bool:
    """304, or CelesTrak's own word for it."""
    told = _NOT_UPDATED.encode() in answer.body
    return answer.status == NOT_MODIFIED or (answer.status in (_OK, _FORBIDDEN) and told)
