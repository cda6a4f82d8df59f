"""Brackets in names and reasons are printed as they are. rich would take them for markup."""

from typing import Any

import pytest

from branchlake_dagster.cli.consumers import show_consumers
from branchlake_dagster.cli.run_branches import show_parked_runs, show_status

REASON = "Interrupted [table raw.orders, branch run-1] [/]"
TABLE = "raw.[/orders"


def test_the_reason_of_a_parked_run_names_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    show_parked_runs([{"run_id": "1", "branch": "run-1", "attempts": 5, "reason": REASON}])
    assert REASON in capsys.readouterr().out


def test_names_that_other_engines_gave(capsys: pytest.CaptureFixture[str]) -> None:
    publication = {"publication": "ab" * 32, "run_id": "1", "verdict": "[/]", "tables": [TABLE]}
    report: dict[str, Any] = {
        "servers": {},
        "page": None,
        "warehouse": "file:///[lake]/[/b]",
        "main": "cd" * 32,
        "discard_grace_h": 24.0,
        "settings_source": "the environment",
        "branches": [],
        "discarded": [],
        "publications": [publication],
    }
    show_status(report)
    show_consumers({"consumers": [], "unreadable": [{"table": TABLE, "trouble": REASON}]})
    output = capsys.readouterr().out
    assert output.count(TABLE) == 2
    assert "file:///[lake]/[/b]" in output
    assert REASON in output
