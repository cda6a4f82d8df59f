"""`branchlake backfill retry` with a real daemon. `test_one_daemon.py` has a backfill that does not fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from branchlake_dagster.cli.dagster_home import dagster_dev
from branchlake_dagster.cli.main import main
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.daemon import home_of, wait_for
from branchlake_dagster_tests.incremental.backfill.changed_pipeline import (
    DAYS,
    publish_unchanged_pipeline,
    sums_of,
)

pytestmark = [pytest.mark.daemon, pytest.mark.soak, pytest.mark.timeout(600)]

MODULE = "branchlake_dagster_tests.incremental.backfill.daemon_project"


def backfill(*arguments: str) -> Any:
    result = CliRunner().invoke(main, ["backfill", *arguments, "-m", MODULE, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_stage_that_failed_is_launched_again_by_the_command(
    lakehouse: Lakehouse, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_unchanged_pipeline(lakehouse, namespace)
    broken = tmp_path / "broken"
    broken.touch()
    monkeypatch.delitem(sys.modules, MODULE, raising=False)  # it reads its namespace when it is imported
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
