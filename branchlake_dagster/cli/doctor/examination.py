"""Findings of the doctor, and what was said where something is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dagster import DagsterError
from grpc import FutureTimeoutError, RpcError
from pyarrow import ArrowException
from pyspark.errors import PySparkException
from sqlalchemy.exc import SQLAlchemyError

from branchlake_dagster.errors import BranchlakeError, without_credentials

State = Literal["right", "wrong", "off"]
_LONGEST = 300
_TELLING = (
    BranchlakeError,
    OSError,
    ImportError,
    ArrowException,
    DagsterError,
    SQLAlchemyError,
    PySparkException,
    RpcError,
    FutureTimeoutError,
)
"""What a place that is not as it should be raises; anything else is a bug of ours and ends as one."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `off`: nothing is wrong, it is not running or not made yet."""

    place: str
    looked_at: str
    state: State
    told: str
    remedy: str | None = None


@dataclass
class Examination:
    """The findings so far. `secrets` are taken out of whatever the places say."""

    secrets: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.state != "wrong" for finding in self.findings)

    def note(self, place: str, looked_at: str, state: State, told: str, remedy: str | None = None) -> None:
        """Add a finding."""
        self.findings.append(Finding(place, looked_at, state, self._clean(told), remedy))

    def look(self, place: str, looked_at: str, action: Callable[[], str], *, remedy: str) -> bool:
        """Add what `action` tells, or its error as something wrong; whether it was right.

        `remedy` follows what the error itself advises.
        """
        try:
            told = action()
        except _TELLING as error:
            hint = error.hint if isinstance(error, BranchlakeError) else None
            text = error.message if isinstance(error, BranchlakeError) else str(error)
            advice = f"{hint} {remedy}" if hint else remedy
            self.note(place, looked_at, "wrong", text or type(error).__name__, advice)
            return False
        self.note(place, looked_at, "right", told)
        return True

    def _clean(self, text: str) -> str:
        line = without_credentials(next((line for line in text.splitlines() if line.strip()), ""))
        for secret in self.secrets:
            line = line.replace(secret, "***")
        return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"
