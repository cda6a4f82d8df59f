"""Throw-away lakes and `publish`, beyond what docs/testing.md shows."""

# No postponed annotations: Dagster reads those of assets.
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from branchlake_dagster import (
    BranchSparkResource,
    LakehouseResource,
    NessieBranchIOManager,
    Settings,
    publish,
    table_metadata,
)
from branchlake_dagster.embedded.process import ProcessRecord, find_start_s
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.publication.run_publication import RunUnknown
from branchlake_dagster.tables.errors import TableMissing
from branchlake_dagster.testing import ThrowawayLake, ThrowawayServer, throwaway_lake, throwaway_server
from branchlake_dagster_tests.suite.raised import raising

ELSEWHERE = {"nessie_uri": "http://127.0.0.1:9/api/v2"}


class Rows(dg.Config):
    n: int = 1


@dg.asset(key_prefix="t", metadata=table_metadata(write_mode="append"))
def numbers(config: Rows) -> pa.Table:
    return pa.table({"n": [config.n]})


@dg.asset_check(asset=numbers, metadata={"branchlake/scope": "table"})
def all_small(numbers: pa.Table) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=max(numbers["n"].to_pylist()) < 10)


@dg.asset(key_prefix="t", metadata=table_metadata(require_checks=False))
def nothing() -> None:
    return None


def run(lake: ThrowawayLake, n: int = 1, **options: Any) -> dg.ExecuteInProcessResult:
    config = {"ops": {"t__numbers": {"config": {"n": n}}}}
    return lake.run(numbers, all_small, run_config=config, **options)


def test_each_lake_is_empty_and_what_the_last_one_had_is_gone(lake: ThrowawayLake) -> None:
    assert lake.tables() == []
    assert lake.references() == []
    run(lake)  # its branch stays
    result = run(lake)
    assert lake.publish(result).published
    assert len(lake.references()) == 1


def test_the_next_one_as_well(lake: ThrowawayLake) -> None:
    test_each_lake_is_empty_and_what_the_last_one_had_is_gone(lake)


def test_a_second_publish_reports_the_result_of_the_first(lake: ThrowawayLake) -> None:
    result = run(lake)
    first = lake.publish(result)
    again = lake.publish(result.run_id)
    assert again.status == first.status == "published"
    assert again.commit == first.commit
    assert lake.lakehouse.nessie.reference("main").hash == first.commit
    blocked = run(lake, 10)
    told = lake.publish(blocked)
    assert (told.status, lake.publish(blocked).status) == ("blocked", "blocked")
    assert lake.publish(blocked).reasons == told.reasons


def test_checks_of_a_rebased_table_are_made_again_in_this_process(lake: ThrowawayLake) -> None:
    first, second = run(lake, 1), run(lake, 2)
    assert lake.publish(first).published
    outcome = lake.publish(second)
    assert outcome.published, outcome
    assert sorted(lake.table("t.numbers")["n"].to_pylist()) == [1, 2]
    assert lake.references() == []


def test_a_run_of_nothing_and_one_that_left_its_check_out(lake: ThrowawayLake) -> None:
    empty = lake.publish(lake.run(nothing))
    assert (empty.status, empty.reasons) == ("discarded", ("the run did not change any table",))
    result = lake.run(numbers)
    outcome = lake.publish(result, lake.definitions(numbers, all_small))
    assert outcome.status == "blocked"
    assert "check all_small on t/numbers was left out of the run" in outcome.reasons


def test_materialize_and_publish(lake: ThrowawayLake) -> None:
    result = dg.materialize([numbers, all_small], instance=lake.instance, resources=lake.resources)
    definitions = dg.Definitions([numbers], asset_checks=[all_small], resources=lake.resources)
    outcome = publish(result, definitions, instance=lake.instance)
    assert outcome.published, outcome
    with raising(ConfigurationError, reason="checks_unknown"):
        lake.publish(result)
    with pytest.raises(RunUnknown):
        publish(dg.materialize([nothing], resources=lake.resources), definitions, instance=lake.instance)
    with raising(ConfigurationError, "LakehouseResource", reason="lake_unknown"):
        publish(result, dg.Definitions([numbers]), instance=lake.instance)


def test_resources_that_name_another_lake_are_replaced(lake: ThrowawayLake) -> None:
    elsewhere = LakehouseResource(**ELSEWHERE)
    spark = BranchSparkResource(lakehouse=elsewhere)
    resources = {
        "lakehouse": elsewhere,
        "io_manager": NessieBranchIOManager(lakehouse=elsewhere, spark=spark),
        "other": 7,
    }
    definitions = dg.Definitions([numbers], asset_checks=[all_small], resources=resources)
    outcome = lake.publish(lake.run(definitions))
    assert outcome.published, outcome
    found = lake.definitions(definitions).resources
    assert found is not None
    assert found["other"] == 7


def test_no_setting_may_name_another_lake(branchlake_server: ThrowawayServer) -> None:
    with (
        raising(ConfigurationError, "nessie_uri", reason="names_another_lake"),
        branchlake_server.lake(**ELSEWHERE),
    ):
        pass


def test_two_lakes_of_one_server_are_refused(branchlake_server: ThrowawayServer, lake: ThrowawayLake) -> None:
    with raising(ConfigurationError, reason="open_already"), branchlake_server.lake():
        pass


def test_the_environment_is_as_before(
    branchlake_server: ThrowawayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRANCHLAKE_NESSIE_URI", ELSEWHERE["nessie_uri"])
    before = dict(os.environ)
    with branchlake_server.lake(default_namespace="shop", require_checks=False) as lake:
        assert Settings().nessie_uri is None
        assert Settings().state_dir == lake.lakehouse.settings.state_dir
        assert not LakehouseResource().lakehouse.settings.require_checks
        assert lake.publish(lake.run(dg.asset(name="a")(lambda: pa.table({"n": [1]})))).published
        assert lake.tables() == ["shop.a"]
        assert lake.table("a") == lake.table(dg.AssetKey("a")) == pa.table({"n": [1]})
    assert dict(os.environ) == before


def test_a_table_that_does_not_exist(lake: ThrowawayLake) -> None:
    result = run(lake)
    with raising(TableMissing, "none", table="t.numbers", reason="no_table"):
        lake.table("t.numbers")
    with raising(TableMissing, "t.numbers", table="t.other", reason="no_table"):
        lake.table("t.other", of=result)
    lake.publish(result)
    with raising(TableMissing, reason="no_branch"):
        lake.table("t.numbers", of=result)


@pytest.fixture
def crowd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_process_left_goes_with_the_next_one(crowd: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended_s = find_start_s(ended.pid)
    ended.communicate(b"\n")
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    sleeper_s = find_start_s(sleeper.pid)
    assert ended_s is not None
    assert sleeper_s is not None
    try:
        with throwaway_server():
            (own,) = crowd.iterdir()
            left = own.with_name(f"{own.name}-left")
            run_folder = left / "state" / "run"
            run_folder.mkdir(parents=True)
            record = ProcessRecord.load(own / "owner.json")
            assert record is not None
            assert record.is_alive()
            replace(record, pid=ended.pid, started_s=ended_s).save(left / "owner.json")
            ProcessRecord("nessie", sleeper.pid, sleeper_s, 1).save(run_folder / "nessie.json")
            with throwaway_server():
                assert not left.exists()
                assert find_start_s(sleeper.pid) is None
                assert own.exists()  # its process is at work
    finally:
        sleeper.kill()
        sleeper.wait()
    assert list(crowd.iterdir()) == []


def test_settings_are_refused_before_a_server_starts(crowd: Path) -> None:
    wrong: Mapping[str, Any] = {"warehouse": "s3://somebody"}
    with (
        raising(ConfigurationError, reason="names_another_lake", subject="warehouse"),
        throwaway_lake(**wrong),
    ):
        pass
    assert list(crowd.iterdir()) == []
