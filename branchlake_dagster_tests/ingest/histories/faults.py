"""One fault in the life of a process: at which of its steps, and of which kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any, TypeVar

import requests
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from urllib3.exceptions import ConnectTimeoutError

from branchlake_dagster.ingest.offsets import Ranges
from branchlake_dagster.ingest.record_frames import LoadedRecords, RawRecord, RecordPosition, Records
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.nessie import transport
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.transport import HttpTransport
from branchlake_dagster.settings import Settings

T = TypeVar("T")


class Fault(StrEnum):
    """What happens at a request to Nessie, or at the pass of Spark."""

    NONE = "nothing"
    REFUSED = "refused once"
    AWAY = "refused for long"
    LOST = "reply lost"
    LOST_ALL = "replies lost for long"
    DIES_BEFORE = "dies before"
    DIES_AFTER = "dies after"
    OTHER_BEFORE = "another one publishes before"
    OTHER_AFTER = "another one publishes after"


_FOR_LONG = 6
"""Requests; a client makes one four times."""
_STEPS = 18
"""Requests of a batch, about; the pass counts as one."""


_NEVER_MADE = ConnectTimeoutError("refused")


class Died(BaseException):
    """The process is gone: nothing of it runs any more, no `except Exception` either."""


@dataclass
class Fate:
    """Of one process. `meanwhile` is called where another one is faster."""

    fault: Fault = Fault.NONE
    at: int = 0
    meanwhile: Callable[[], None] = lambda: None
    met: list[str] = field(default_factory=list)
    """What has happened, and at what."""
    _steps: int = 0
    _dead: bool = False

    @classmethod
    def drawn(cls, random: Random, meanwhile: Callable[[], None]) -> Fate:
        """By chance. One at a request that changes something is as likely as one at any other."""
        return cls(random.choice([*Fault][1:]), random.randrange(_STEPS), meanwhile)

    def step(self, what: str, do: Callable[[], T], lost: Callable[[bool], Exception]) -> T:
        """Do it, or not, or as if not. `lost` makes the error for one that was, or was not, sent."""
        if self._dead:
            raise Died
        place, self._steps = self._steps - self.at, self._steps + 1
        long = self.fault in (Fault.AWAY, Fault.LOST_ALL)
        if self.fault is Fault.NONE or not 0 <= place < (_FOR_LONG if long else 1):
            return do()
        self.met.append(f"{self.fault}: {what}")
        if self.fault in (Fault.REFUSED, Fault.AWAY):
            raise lost(False)
        if self.fault is Fault.DIES_BEFORE:
            self._die()
        if self.fault is Fault.OTHER_BEFORE:
            self.meanwhile()
        answer = do()
        if self.fault in (Fault.LOST, Fault.LOST_ALL):
            raise lost(True)
        if self.fault is Fault.DIES_AFTER:
            self._die()
        if self.fault is Fault.OTHER_AFTER:
            self.meanwhile()
        return answer

    def _die(self) -> None:
        self._dead = True
        raise Died


class FaultyTransport(HttpTransport):
    """HTTP with a fate."""

    def __init__(self, uri: str, token: str | None, fate: Fate) -> None:
        super().__init__(uri, token=token, verify=True, connect_timeout_s=3, read_timeout_s=30)
        self._fate = fate

    def send(
        self,
        method: str,
        path: str,
        decode: Callable[[Any], T],
        *,
        action: str,
        changes: bool,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> T:
        def do() -> T:
            return HttpTransport.send(
                self, method, path, decode, action=action, changes=changes, params=params, body=body
            )

        def lost(sent: bool) -> Exception:
            cause = requests.ReadTimeout("lost") if sent else requests.ConnectionError(_NEVER_MADE)
            return transport.error_from_exception(cause, action=action, changes=changes, server=self.uri)

        return self._fate.step(f"{method} {path.split('/')[0]} {action.split()[0]}", do, lost)


class FaultyLake(Lakehouse):
    """A lake as a process with a fate sees it. It never waits."""

    def __init__(self, settings: Settings, fate: Fate) -> None:
        super().__init__(settings)
        at = self.endpoints(spark=False)
        faulty = FaultyTransport(at.nessie_uri, at.nessie_token, fate)
        self._faulty = NessieClient(at.nessie_uri, transport=faulty, sleep=lambda _: None)

    @property
    def nessie(self) -> NessieClient:
        return self._faulty


class PassFailed(PySparkException):
    """Spark's pass failed."""


@dataclass
class FaultyRecords:
    """Records whose pass has a fate as well."""

    records: Records
    fate: Fate

    def load_frame(self, session: SparkSession, ranges: Ranges, *, tasks: int) -> LoadedRecords:
        return self.fate.step(
            "pass",
            lambda: self.records.load_frame(session, ranges, tasks=tasks),
            lambda _: PassFailed("lost"),
        )

    def translate_errors(self) -> AbstractContextManager[None]:
        return self.records.translate_errors()

    def fetch(self, positions: Iterable[RecordPosition]) -> list[RawRecord]:
        return self.records.fetch(positions)

    def require_undamaged(self, ranges: Ranges) -> None:
        self.records.require_undamaged(ranges)

    def ranges_before_damage(self, ranges: Ranges) -> Ranges:
        return self.records.ranges_before_damage(ranges)

    def require_complete(self, ranges: Ranges, count: int) -> None:
        self.records.require_complete(ranges, count)
