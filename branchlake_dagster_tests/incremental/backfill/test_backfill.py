"""A backfill through three stages on the real Nessie: planned, launched, followed to its end."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from click.testing import CliRunner

from branchlake_dagster import incremental_sensor
from branchlake_dagster.branching.resources.lakehouse_resource import LakehouseResource
from branchlake_dagster.cli.incremental import backfill
from branchlake_dagster.cli.main import main
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.incremental.backfill.stages import Pipeline
from branchlake_dagster_tests.incremental.sources import values


def follow(p: Project) -> list[str]:
    """What the sensor launches, run and published until there is nothing more; in order."""
    sensor, cursor, done = incremental_sensor(), None, []
    for _ in range(10):
        with dg.build_sensor_context(
            p.instance,
            cursor=cursor,
            repository_def=p.definitions.get_repository_def(),
            resources={"lakehouse": LakehouseResource.of(p.lake.settings)},
        ) as context:
            found = sensor(context)
        assert isinstance(found, dg.SensorResult)
        cursor = found.cursor
        if not found.run_requests:
            return done
        for request in found.run_requests:
            (key,) = request.asset_selection or ()
            p.settle(p.run(key, partition=request.partition_key))
            done.append(f"{key.path[-1]} {request.partition_key or ''}".strip())
    raise AssertionError(f"it goes on and on: {done}")


@pytest.fixture
def pipeline(namespace: str) -> Pipeline:
    return Pipeline(namespace)


@pytest.fixture
def p(lakehouse: Lakehouse, pipeline: Pipeline) -> Iterator[Project]:
    with project(lakehouse, *pipeline.assets) as made:
        for day in ("2026-08-01", "2026-08-02"):
            made.settle(made.run(pipeline.events.key, partition=day))
        follow(made)
        yield made


def place(p: Project) -> backfill.Place:
    return backfill.Place(p.graph, LakehouseResource.of(p.lake.settings), p.instance)


def test_a_backfill_goes_through_all_stages(p: Project, pipeline: Pipeline) -> None:
    where, asset = place(p), pipeline.events.key.to_user_string()
    what = backfill.asked(where, asset, ["2026-08-02"], everything=False)
    assert what is not None
    stages = backfill.stages(where, what)
    assert [(one.asset.path[-1], one.partitions, one.by_itself) for one in stages] == [
        ("events", ("2026-08-02",), False),
        ("daily", ("2026-08-02",), True),
        ("report", None, False),
        ("total", None, True),
    ]
    assert [(one.number, one.rows) for one in stages] == [(0, 2), (1, 1), (2, 0), (2, 2)]
    number = backfill.run(where, what, time.time())
    launched = p.instance.get_backfill(number)
    assert launched is not None
    assert launched.tags["branchlake/rebuild"] == "true"
    first, second, report, third = backfill.status(where, number)
    assert (first.planned, first.done, first.running) == (1, 0, 1)
    assert second.told == third.told == "waits for the stage before it"
    assert "launch it" in report.told
    # What Dagster's daemon does, and then what the sensor does.
    pipeline.factor = 7
    p.settle(p.run(pipeline.events.key, partition="2026-08-02", tags=dict(launched.tags)))
    _, second, _, _ = backfill.status(where, number)
    assert (second.done, second.left) == (0, 1)
    assert follow(p) == ["daily 2026-08-02", "total"]
    _, second, _, third = backfill.status(where, number)
    assert (second.left, third.left) == (0, 0)
    assert [row[1] for row in values(p, pipeline.total)] == [22, 154]


def test_partitions_of_an_older_code_version_are_stale(
    p: Project, pipeline: Pipeline, namespace: str
) -> None:
    asset = pipeline.events.key.to_user_string()
    assert backfill.asked(place(p), asset, [], everything=False) is None
    newer = Pipeline(namespace, factor=2)
    with project(p.lake, *newer.assets) as again:
        where = backfill.Place(again.graph, LakehouseResource.of(p.lake.settings), p.instance)
        what = backfill.asked(where, asset, [], everything=False)
        assert what is not None
        assert what.partitions == ("2026-08-01", "2026-08-02")
        assert "code version 2" in what.why
    with pytest.raises(ConfigurationError, match="no code version"):
        backfill.asked(place(p), pipeline.daily.key.to_user_string(), [], everything=False)


def test_mistakes_are_told(p: Project, pipeline: Pipeline) -> None:
    where = place(p)
    with pytest.raises(ConfigurationError, match="no asset nobody"):
        backfill.asked(where, "nobody", ["x"], everything=False)
    wrong = backfill.asked(where, pipeline.events.key.to_user_string(), ["1999-01-01"], everything=False)
    assert wrong is not None
    with pytest.raises(ConfigurationError, match="1999-01-01"):
        backfill.stages(where, wrong)
    with pytest.raises(ConfigurationError, match="no asset backfill gone"):
        backfill.status(where, "gone")


MODULE = """
import dagster as dg
import polars as pl
from branchlake_dagster import table_metadata

@dg.asset(key=["{namespace}", "events"], metadata=table_metadata(require_checks=False))
def events() -> pl.DataFrame:
    return pl.DataFrame({{"n": [1]}})

defs = dg.Definitions(assets=[events])
"""


def test_the_commands(
    lakehouse: Lakehouse, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"m_{namespace}.py").write_text(MODULE.format(namespace=namespace))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("BRANCHLAKE_STATE_DIR", str(lakehouse.settings.state_dir))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments: str) -> str:
        result = CliRunner().invoke(main, ["backfill", *arguments, "-m", f"m_{namespace}"])
        assert result.exit_code == 0, result.output
        return result.output

    assert "asked for by hand" in call("plan", f"{namespace}/events", "--all")
    number = call("run", f"{namespace}/events", "--all").split()[1].rstrip(".")
    assert "0 of 1 partition" in call("status", number)
    missing = CliRunner().invoke(main, ["backfill", "plan", "x", "-m", "no_such_module"])
    assert missing.exit_code == 1
    assert "cannot be loaded" in missing.output
