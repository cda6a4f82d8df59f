"""Space-Track's GP class, behind its login.

Its rules (space-track.org/documentation#/api): fewer than 30 requests a minute and 300 an hour, the current
GP catalogue at most once an hour, off the full and half hours.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from branchlake_dagster.sda.providers.download import Downloader, RetryRule, Surroundings
from branchlake_dagster.sda.providers.errors import ProviderLoginFailed, ProviderRefused
from branchlake_dagster.sda.providers.kept import AnswerCache, Entry, RateLimit, locked
from branchlake_dagster.sda.providers.pulled import GpProvider, Pull, utc

_OK, _UNAUTHORISED = 200, 401
_LOGIN_FAILED = b'"Failed"'
_SHOWN = 160


class SpaceTrack(GpProvider):
    """The current GP catalogue of Space-Track.

    User and password are read from the environment when they are needed, so that Dagster never has them.
    Requests of all processes that share `cache_dir` are counted together.
    """

    cache_dir: str
    identity_variable: str = Field("SPACETRACK_IDENTITY", description="Environment variable of the user.")
    password_variable: str = Field("SPACETRACK_PASSWORD", description="Environment variable of the password.")
    query: str = "class/gp/decay_date/null-val/epoch/%3Enow-30/orderby/norad_cat_id/format/json"
    group: str = "current"
    format: str = "json"
    url: str = "https://www.space-track.org"
    keep_s: float = Field(3_600.0, ge=0, description="Shortest time between two questions, seconds.")
    per_minute: int = Field(29, ge=1, description="The provider allows fewer than 30.")
    per_hour: int = Field(299, ge=1, description="The provider allows fewer than 300.")
    most_wait_s: float = Field(30.0, ge=0, description="Longest wait for a turn, seconds.")
    connect_s: float = Field(3.0, gt=0)
    read_s: float = Field(15.0, gt=0)
    tries: int = Field(4, ge=1)
    give_up_s: float = Field(45.0, gt=0, description="A schedule's tick ends after a minute.")
    max_download_mb: int = Field(256, ge=1)

    def pull(self, around: Surroundings | None = None) -> Pull:
        """The newest catalogue, from the provider or from what is kept.

        Raises:
            ProviderBusy: the limits leave no request for now.
            ProviderLoginFailed: identity and password are not accepted.
            ProviderRefused: the query is wrong.
            ProviderUnavailable: it gave no whole answer.

        """
        around = around or Surroundings()
        query = f"{self.url}/basicspacedata/query/{self.query}"
        cache = AnswerCache(Path(self.cache_dir) / "space-track", around)
        with locked(cache.path(query)):
            known = cache.get(query)
            if known is None or not 0 <= around.wall() - known.asked_at < self.keep_s:
                body = self._download(query, around)
                now = around.wall()
                known = cache.put(query, Entry(body, now, now, None, None))
        return Pull("spacetrack", self.group, self.format, known.body, utc(known.fetched_at))

    def _download(self, query: str, around: Surroundings) -> bytes:
        limit = RateLimit(
            Path(self.cache_dir) / "space-track" / "requests.json",
            ((self.per_minute, 60.0), (self.per_hour, 3_600.0)),
            most_wait_s=self.most_wait_s,
            provider="Space-Track",
            around=around,
        )
        downloader = Downloader(
            "Space-Track",
            connect_s=self.connect_s,
            read_s=self.read_s,
            max_bytes=self.max_download_mb << 20,
            retry=RetryRule(tries=self.tries, give_up_s=self.give_up_s),
            around=around,
        )
        self._log_in(downloader, limit)
        answer = downloader.ask(query, before=limit.take)
        if answer.status == _UNAUTHORISED:  # the session ended between the two
            self._log_in(downloader, limit)
            answer = downloader.ask(query, before=limit.take)
        start = answer.body.lstrip()[:1]
        if answer.status != _OK or (self.format == "json" and start != b"["):
            told = answer.body[:_SHOWN].decode(errors="replace").strip() or "nothing"
            raise ProviderRefused(
                f"Space-Track answered {answer.status}: {told}.",
                hint="Try the query in its query builder, and see its API guidelines.",
            )
        return answer.body

    def _log_in(self, downloader: Downloader, limit: RateLimit) -> None:
        names = {"identity": self.identity_variable, "password": self.password_variable}
        form = {name: os.environ.get(variable, "") for name, variable in names.items()}
        if absent := [names[name] for name, value in form.items() if not value]:
            raise ProviderLoginFailed(
                f"{' and '.join(absent)} must be set to log in to Space-Track.",
                hint="Set them where the code location runs; an account is free.",
                reason="variables_missing",
                subject=", ".join(absent),
            )
        answer = downloader.ask(f"{self.url}/ajaxauth/login", form=form, before=limit.take)
        if answer.status != _OK or _LOGIN_FAILED in answer.body:
            raise ProviderLoginFailed(
                f"Space-Track refused the login (status {answer.status}).",
                hint="Check identity and password on its site; after several failures it locks the account.",
            )
