"""The benchmark of the space pipeline: its memory figure, its command, and a tiny run on the real stack."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from branchlake_dagster.cli.main import main
from branchlake_dagster.sda.benchmarks import association, registry, sensor_pipeline, tracks
from branchlake_dagster.sda.benchmarks.process_memory import watch_memory
from branchlake_dagster.sda.benchmarks.sensor_pipeline import STAGES
from branchlake_dagster_tests.suite.json_contract import check_output

_MB = 1_000_000
_HOLD = "held = bytearray(b'x' * 200_000_000); print(len(held), flush=True); input()"


def test_the_peak_has_the_memory_of_children_and_of_servers_that_have_ended() -> None:
    with watch_memory([]) as alone:
        pass
    with (
        watch_memory([]) as memory,
        subprocess.Popen(
            [sys.executable, "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child,
    ):
        assert child.stdout is not None
        assert int(child.stdout.readline()) == 200 * _MB
        deadline = 100
        while memory.peak_mb < alone.peak_mb + 200 and deadline:
            deadline -= 1
            memory.stopped.wait(0.1)
        child.communicate("\n")
    assert memory.peak_mb >= alone.peak_mb + 200


@pytest.mark.parametrize("count", [1, 2])
def test_the_command_refuses_too_few_files(tmp_path: Path, count: int) -> None:
    paths = [tmp_path / f"{number}.tle" for number in range(count)]
    for path in paths:
        path.write_text("")
    assert CliRunner().invoke(main, ["bench", "sda", *map(str, paths)]).exit_code == 2


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.timeout(1_800)
def test_a_tiny_run_has_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain Spark and the pipeline must publish the same number of observations, else the command fails."""
    for module, name, value in (
        (sensor_pipeline, "_OBJECTS", 300),
        (sensor_pipeline, "_LARGE_OBJECTS", 400),
        (sensor_pipeline, "_REGISTRY_ROWS", 5_000),
        (sensor_pipeline, "_SCREENING_HOURS", 1.0),
        (sensor_pipeline, "_QUALITY_HOURS", 0.25),
        (registry, "_WARM_UP_ROWS", 500),
        (association, "_OBJECTS", 200),
        (tracks, "_OBJECTS", 200),
    ):
        monkeypatch.setattr(module, name, value)
    done = CliRunner().invoke(main, ["bench", "sda", "--observations", "1000", "--json"])
    assert done.exit_code == 0, done.output
    check_output(["bench", "sda", "--json"], done.stdout)
    figures = json.loads(done.stdout)
    assert set(STAGES) < set(figures["stages"])
    assert figures["observations"] > 900
    assert figures["large_observations"] > 3 * figures["observations"]
    rates = {name: figures[name] for name in figures if name.endswith("obs_per_s")}
    assert len(rates) == 5
    assert all(rate > 0 for rate in rates.values()), rates
    assert figures["peak_mb"] > 500
    assert figures["screening_27k_objects"] == 400
    assert figures["median_error_m"] < figures["element_set_error_m"]
