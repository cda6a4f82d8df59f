"""The report of `branchlake doctor`, which checks every configured address, version and permission.

The checks start no server. They write only to a temporary branch and a temporary folder, and remove both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from branchlake_dagster.cli.command_settings import ENVIRONMENT
from branchlake_dagster.cli.doctor_examinations import (
    Examination,
    Finding,
    FindingState,
    examine_dagster,
    examine_kafka,
    examine_lake,
)
from branchlake_dagster.settings import Settings

_CORRECT_THE_CODE = (
    "Correct the error if this code location has your lake. Until then, the settings come from another"
    " source."
)
_WIDE = 200
"""Width of the table, in characters, if the output is not a terminal."""
_WIDE_ENOUGH = 70
"""Width in characters below which the table would cut names of checks."""
_COLORS: dict[FindingState, str] = {"right": "green", "wrong": "red", "off": "yellow"}


def examine_setup(settings: Settings, source: str = ENVIRONMENT, trouble: str | None = None) -> Examination:
    """Check everything that `settings` and Dagster's home configure.

    `source` describes the source of the settings. `trouble` describes code locations that could not be
    loaded.
    """
    secret_values = (getattr(settings, name) for name in Settings.secret_names())
    examination = Examination(
        tuple(secret.get_secret_value() for secret in secret_values if secret is not None)
    )
    examination.add_finding("Settings", "source", "right", source)
    if trouble is not None:
        examination.add_finding("Settings", "code location", "off", trouble, _CORRECT_THE_CODE)
    examine_lake(examination, settings)
    examine_kafka(examination, settings)
    examine_dagster(examination, settings)
    return examination


def examination_to_dict(examination: Examination) -> dict[str, Any]:
    """Convert an examination to a JSON object."""
    return {
        "healthy": examination.healthy,
        "findings": [finding.as_dict() for finding in examination.findings],
    }


def show_examination(examination: Examination, console: Console | None = None) -> None:
    """Print the findings of all checks as a table, followed by the remedies of those that have one.

    A narrow terminal gets a line for each finding instead. `console` is None for standard output.
    """
    is_narrowed = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = console or (Console() if is_narrowed else Console(width=_WIDE))
    table = Table()
    for name in ("subject", "check", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("result", overflow="fold")
    is_wide = console.width >= _WIDE_ENOUGH
    for finding in examination.findings:
        state, result = f"[{_COLORS[finding.state]}]{finding.state}[/]", _escape_markup(finding.result)
        if is_wide:
            table.add_row(finding.place, finding.looked_at, state, result)
        else:
            console.print(f"{state}: {finding.place}, {finding.looked_at}: {result}", soft_wrap=True)
    if is_wide:
        console.print(table)
    for finding in _findings_with_remedy(examination.findings):
        heading = f"[{_COLORS[finding.state]}]{finding.place}, {finding.looked_at}:[/]"
        console.print(f"{heading} {_escape_markup(finding.remedy or '')}", soft_wrap=True)
    if examination.healthy:
        console.print("Nothing is wrong.")


def _findings_with_remedy(findings: Iterable[Finding]) -> Iterable[Finding]:
    return (finding for finding in findings if finding.state != "right" and finding.remedy)


def _escape_markup(message: str) -> str:
    # rich treats brackets as markup, so it would not print `[postgres]`.
    return message.replace("[", r"\[")
