"""`branchlake doctor`: whether every configured address, version and permission is as a run needs it.

It starts no server. It writes to a branch and a folder of its own names only, and removes both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from branchlake_dagster.cli.command_settings import ENVIRONMENT
from branchlake_dagster.cli.doctor_examinations import Examination, Finding, State, dagster, kafka, lake
from branchlake_dagster.settings import Settings

_CORRECT_THE_CODE = (
    "Correct the error if this code location has your lake: other settings are used until then."
)
_COLOURS: dict[State, str] = {"right": "green", "wrong": "red", "off": "yellow"}


def examine(settings: Settings, source: str = ENVIRONMENT, trouble: str | None = None) -> Examination:
    """Look at everything that `settings` and Dagster's own home configure.

    `source` says where the settings come from, `trouble` which code locations could not be loaded.
    """
    given = (getattr(settings, name) for name in Settings.secrets())
    found = Examination(tuple(secret.get_secret_value() for secret in given if secret is not None))
    found.note("Settings", "source", "right", source)
    if trouble is not None:
        found.note("Settings", "code location", "off", trouble, _CORRECT_THE_CODE)
    lake(found, settings)
    kafka(found, settings)
    dagster(found, settings)
    return found


def as_dict(found: Examination) -> dict[str, Any]:
    """For `--json`."""
    return {"healthy": found.healthy, "findings": [asdict(finding) for finding in found.findings]}


def show(found: Examination) -> None:
    """The findings as a table, and below it what to do about those that are wrong."""
    console = Console()
    table = Table("subject", "check", "state", "result")
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
