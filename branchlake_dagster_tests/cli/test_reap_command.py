"""What `branchlake reap` says."""

from datetime import timedelta

import pytest

from branchlake_dagster.cleanup.reaper_rules import OwnerState, Reaping, ReapingAction
from branchlake_dagster.cleanup.sweeper import Sweeping
from branchlake_dagster.cli.run_branches import show_reaping

REAPED = [
    Reaping(
        "run-1", "1", ReapingAction.KEEP, "its writer beats", OwnerState.ACTIVE, timedelta(hours=7), "beating"
    ),
    Reaping(
        "run-2",
        "2",
        ReapingAction.DISCARD,
        "no run of that id is known",
        age=timedelta(minutes=90, seconds=5),
    ),
    Reaping("run-3", "3", ReapingAction.DELETE, "its run is published", OwnerState.PUBLISHED),
]
SWEPT = [
    Sweeping("discarded-4", "4", True, "nobody needs its files", 12, 3_400_000),
    Sweeping("discarded-5", "5", False, "a retry may continue it for another 3.0 h"),
]


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in capsys.readouterr().out.splitlines()
        if "│" in line
    ]


def test_each_branch_and_each_tag_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    show_reaping(REAPED, SWEPT, dry_run=True)
    assert lines(capsys) == [
        ["run-1", "active", "7 h 0 min", "beating", "kept", "its writer beats"],
        ["run-2", "missing", "1 h 30 min", "none", "would be discarded", "no run of that id is known"],
        ["run-3", "published", "?", "none", "would be deleted", "its run is published"],
        ["discarded-4", "would be swept", "12", "3.4 MB", "nobody needs its files"],
        ["discarded-5", "kept", "0", "0.0 MB", "a retry may continue it for another 3.0 h"],
    ]


def test_what_was_freed_is_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    show_reaping(REAPED, SWEPT, dry_run=False)
    told = capsys.readouterr().out
    assert "12 files, 3.4 MB freed." in told
    assert "would be" not in told


def test_an_empty_lake(capsys: pytest.CaptureFixture[str]) -> None:
    show_reaping([], [], dry_run=True)
    assert capsys.readouterr().out == "No run branches.\n"
