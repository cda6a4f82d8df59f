"""`branchlake doctor`: whether every configured address, version and permission is as a run needs it.

It starts no server. It writes to a branch and a folder of its own names only, and removes both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dagster import DagsterError
from grpc import FutureTimeoutError, RpcError
from pyarrow import ArrowException
from pyspark.errors import PySparkException
from rich.console import Console
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError

from branchlake_dagster.errors import BranchlakeError, without_credentials
from branchlake_dagster.settings import Settings

State = Literal["right", "wrong", "off"]
_COLOURS: dict[State, str] = {"right": "green", "wrong": "red", "off": "yellow"}
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


def examine(settings: Settings) -> Examination:
    """Look at everything that `settings` and Dagster's own home configure."""
    from branchlake_dagster.cli.doctor.dagster import dagster
    from branchlake_dagster.cli.doctor.lake import lake

    given = (getattr(settings, name) for name in Settings.secrets())
    found = Examination(tuple(secret.get_secret_value() for secret in given if secret is not None))
    lake(found, settings)
    dagster(found, settings)
    return found


def as_dict(found: Examination) -> dict[str, Any]:
    """For `--json`."""
    return {"healthy": found.healthy, "findings": [asdict(finding) for finding in found.findings]}


def show(found: Examination) -> None:
    """The findings as a table, and below it what to do about those that are wrong."""
    console = Console()
    table = Table("place", "looked at", "state", "told")
    for finding in found.findings:
        colour = _COLOURS[finding.state]
        table.add_row(finding.place, finding.looked_at, f"[{colour}]{finding.state}[/]", _plain(finding.told))
    console.print(table)
    for finding in _with_remedy(found.findings):
        where = f"[{_COLOURS[finding.state]}]{finding.place}, {finding.looked_at}:[/]"
        console.print(f"{where} {_plain(finding.remedy or '')}", soft_wrap=True)
    if found.healthy:
        console.print("Nothing is wrong.")


def _with_remedy(findings: Iterable[Finding]) -> Iterable[Finding]:
    return (finding for finding in findings if finding.state != "right" and finding.remedy)


def _plain(text: str) -> str:
    # Brackets are markup to rich: `[postgres]` would not be shown.
    return text.replace("[", r"\[")
