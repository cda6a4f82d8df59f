"""Download GP catalogs from Space-Track, which needs a login.

Space-Track allows fewer than 30 requests a minute and 300 an hour. It allows the current GP catalog at most
once an hour, and not at full or half hours (space-track.org/documentation#/api).
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from branchlake_dagster.sda.providers.download import Downloader, ProviderClock, RetryRule
from branchlake_dagster.sda.providers.errors import ProviderLoginFailed, ProviderRefused
from branchlake_dagster.sda.providers.kept import AnswerCache, CachedAnswer, RateLimit, lock_file
from branchlake_dagster.sda.providers.pulled import GpProvider, Pull, is_catalog, utc_datetime

_OK, _UNAUTHORIZED = 200, 401
_LOGIN_FAILED = b'"Failed"'
_MAX_SHOWN_BYTES = 160


class SpaceTrack(GpProvider):
    """The current GP catalog of Space-Track.

    User and password are read from the environment when they are needed, so Dagster never stores them.
    The limits apply to all processes that share `cache_dir`.
    """

    cache_dir: str
    identity_variable: str = Field("SPACETRACK_IDENTITY", description="Environment variable of the user.")
    password_variable: str = Field("SPACETRACK_PASSWORD", description="Environment variable of the password.")
    query: str = "class/gp/decay_date/null-val/epoch/%3Enow-30/orderby/norad_cat_id/format/json"
    group: str = "current"
    format: str = "json"
    url: str = "https://www.space-track.org"
    keep_s: float = Field(3_600.0, ge=0, description="Minimum time between two requests, seconds.")
    per_minute: int = Field(29, ge=1, description="The provider allows fewer than 30.")
    per_hour: int = Field(299, ge=1, description="The provider allows fewer than 300.")
    most_wait_s: float = Field(30.0, ge=0, description="Maximum wait for the rate limit, seconds.")
    connect_s: float = Field(3.0, gt=0)
    read_s: float = Field(15.0, gt=0)
    tries: int = Field(4, ge=1)
    give_up_s: float = Field(
        45.0, gt=0, description="No attempt starts later, seconds; a schedule's tick ends after a minute."
    )
    max_download_mb: int = Field(256, ge=1)

    def pull(self, clock: ProviderClock | None = None) -> Pull:
        """Return the newest catalog, from the cache or from the provider.

        Raises:
            ProviderBusy: the rate limit does not allow a request now.
            ProviderLoginFailed: user or password are missing or not accepted.
            ProviderRefused: the query is wrong, or the answer has no catalog.
            ProviderUnavailable: the provider gave no complete answer in any attempt.

        """
        clock = clock or ProviderClock()
        query = f"{self.url}/basicspacedata/query/{self.query}"
        cache = AnswerCache(Path(self.cache_dir) / "space-track")
        with lock_file(cache.answer_path(query)):
            cached_answer = cache.get(query)
            if cached_answer is None or not 0 <= clock.wall_time() - cached_answer.asked_at < self.keep_s:
                body = self._download(query, clock)
                now = clock.wall_time()
                new_answer = CachedAnswer(body, now, now, None, None)
                cached_answer = cache.update(query, cached_answer, new_answer)
        return Pull(
            "spacetrack", self.group, self.format, cached_answer.body, utc_datetime(cached_answer.fetched_at)
        )

    def _download(self, query: str, clock: ProviderClock) -> bytes:
        limit = RateLimit(
            Path(self.cache_dir) / "space-track" / "requests.json",
            ((self.per_minute, 60.0), (self.per_hour, 3_600.0)),
            most_wait_s=self.most_wait_s,
            provider="Space-Track",
            clock=clock,
        )
        downloader = Downloader(
            "Space-Track",
            connect_s=self.connect_s,
            read_s=self.read_s,
            max_bytes=self.max_download_mb << 20,
            retry=RetryRule(tries=self.tries, give_up_s=self.give_up_s),
            clock=clock,
        )
        self._log_in(downloader, limit)
        answer = downloader.request(query, before_attempt=limit.acquire)
        if answer.status == _UNAUTHORIZED:  # the session ended after the login
            self._log_in(downloader, limit)
            answer = downloader.request(query, before_attempt=limit.acquire)
        if answer.status != _OK or not is_catalog(answer.body, self.format):
            body_start = answer.body[:_MAX_SHOWN_BYTES].decode(errors="replace").strip() or "nothing"
            raise ProviderRefused(
                f"Space-Track answered the query with status {answer.status}: {body_start}.",
                hint="Check the setting query in Space-Track's query builder, and see its API guidelines.",
            )
        return answer.body

    def _log_in(self, downloader: Downloader, limit: RateLimit) -> None:
        variable_names = {"identity": self.identity_variable, "password": self.password_variable}
        form = {name: os.environ.get(variable, "") for name, variable in variable_names.items()}
        if missing_variables := [variable_names[name] for name, value in form.items() if not value]:
            raise ProviderLoginFailed(
                "The login to Space-Track needs environment variables that are not set:"
                f" {', '.join(missing_variables)}.",
                hint="Set them in the environment of the code location. An account is free.",
                reason="variables_missing",
                subject=", ".join(missing_variables),
            )
        answer = downloader.request(f"{self.url}/ajaxauth/login", form=form, before_attempt=limit.acquire)
        if answer.status != _OK or _LOGIN_FAILED in answer.body:
            raise ProviderLoginFailed(
                f"Space-Track refused the login (status {answer.status}).",
                hint="Check user and password on its site. After several failures it locks the account.",
            )
