"""`branchlake backfill run` with a real daemon: its first stage runs, and the others follow by themselves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

from branchlake_dagster.cli.dagster_home import dagster_dev
from branchlake_dagster.cli.main import main
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.daemon import home_of, wait_for
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.incremental.backfill.stages import Pipeline
from branchlake_dagster_tests.incremental.sources import published

pytestmark = [pytest.mark.daemon, pytest.mark.timeout(600)]

MODULE = "branchlake_dagster_tests.incremental.backfill.daemon_project"
DAYS = ("2026-08-01", "2026-08-02")


def backfill(*arguments: str) -> Any:
    result = CliRunner().invoke(main, ["backfill", *arguments, "-m", MODULE, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def fill(lakehouse: Lakehouse, namespace: str) -> None:
    """Publish the pipeline as it was before the change."""
    before = Pipeline(namespace)
    with project(lakehouse, *before.assets) as p:
        for day in DAYS:
            published(p, before.events, partition=day)
        for day in DAYS:
            published(p, before.daily, partition=day)
        published(p, before.total)


def sums_of(lakehouse: Lakehouse, namespace: str) -> list[int]:
    rows = lakehouse.catalog().load_table((namespace, "total")).scan().to_arrow().to_pylist()
    return sorted(row["price"] for row in rows)


def test_a_change_of_the_code_goes_through_all_stages_unaided(
    lakehouse: Lakehouse, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(lakehouse, namespace)

    def sums() -> list[int]:
        return sums_of(lakehouse, namespace)

    assert sums() == [22, 22]
    monkeypatch.delitem(sys.modules, MODULE, raising=False)  # it reads its namespace when it is imported
    with home_of(lakehouse, namespace, tmp_path) as environment:
        planned = backfill("plan", f"{namespace}/events")
        assert [(one["asset"].split("/")[1], one["partitions"], one["by_itself"]) for one in planned] == [
            ("events", [*DAYS], False),
            ("daily", [*DAYS], True),
            ("report", None, False),
            ("total", None, True),
        ]
        number = backfill("run", f"{namespace}/events")["backfill"]
        with dagster_dev(MODULE, home=tmp_path, environment=environment):
            wait_for(lambda: sums() == [7 * 22, 7 * 22], seconds=300)
            # The command reads the code location anew each time.
            wait_for(lambda: all(one["told"] for one in backfill("status", number)), seconds=60, every_s=2.0)
            wait_for(
                lambda: not any(one["running"] for one in backfill("status", number)),
                seconds=120,
                every_s=2.0,
            )
        with dg.DagsterInstance.get() as instance:
            runs = instance.get_runs()
        assert all(run.is_success for run in runs)
        by_asset = {one.path[1]: 0 for run in runs for one in run.asset_selection or ()}
        for run in runs:
            for one in run.asset_selection or ():
                by_asset[one.path[1]] += 1
        assert by_asset.keys() == {"events", "daily", "total"}
        assert (by_asset["events"], by_asset["daily"]) == (2, 2)
        status = {one["asset"].split("/")[1]: one for one in backfill("status", number)}
        assert (status["events"]["done"], status["daily"]["done"], status["total"]["done"]) == (2, 2, 1)
        assert "launch it" in status["report"]["told"]
        assert backfill("plan", f"{namespace}/events") == []


def test_a_stage_that_failed_is_launched_again_by_the_command(
    lakehouse: Lakehouse, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(lakehouse, namespace)
    broken = tmp_path / "broken"
    broken.touch()
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    more = {"BRANCHLAKE_TEST_BROKEN": str(broken)}
    with home_of(lakehouse, namespace, tmp_path, more=more) as environment:
        chosen = [part for day in DAYS for part in ("--partition", day)]
        number = backfill("run", f"{namespace}/events", *chosen)["backfill"]

        def daily() -> Any:
            return next(one for one in backfill("status", number) if one["asset"].endswith("daily"))

        with dagster_dev(MODULE, home=tmp_path, environment=environment):
            wait_for(lambda: daily()["failed_partitions"] == [*DAYS], seconds=300)
            broken.unlink()
            (launched,) = backfill("retry", number)["launched"]
            assert (launched["asset"], launched["rebuild"]) == (f"{namespace}/daily", False)
            assert {*launched["partitions"]} <= {*DAYS}
            wait_for(lambda: {*sums_of(lakehouse, namespace)} == {7 * 22}, seconds=300)
            wait_for(lambda: daily()["failed"] == 0, seconds=120)
        assert backfill("retry", number) == {"launched": [], "lost": []}
