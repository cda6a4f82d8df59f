"""Benchmarks work in a lake of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from branchlake_dagster.bench.own_lake import own_lake
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.suite.raised import raising


@pytest.mark.parametrize(
    ("named", "variable"),
    [
        ({"nessie_uri": "https://nessie.example.com/api/v2"}, "BRANCHLAKE_NESSIE_URI"),
        ({"spark_remote": "sc://spark.example.com"}, "BRANCHLAKE_SPARK_REMOTE"),
        ({"warehouse": "s3://lake/tables"}, "BRANCHLAKE_WAREHOUSE"),
    ],
)
def test_a_lake_in_use_is_refused(named: dict[str, Any], variable: str, tmp_path: Path) -> None:
    """They write to `main`, some of them to tables that the pipeline has."""
    settings = Settings(state_dir=tmp_path).model_copy(update=named)
    with (
        raising(ConfigurationError, f"-u {variable}", reason="servers_of_others", subject=variable),
        own_lake(settings),
    ):
        pass


def test_state_broker_and_dagster_home_are_its_own_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with own_lake(Settings(state_dir=tmp_path, kafka_bootstrap="kafka.example.com:9092")) as bench:
        assert bench.kafka_bootstrap is None
        assert bench.embedded_warehouse
        assert tmp_path not in (bench.state_dir, *bench.state_dir.parents)
        assert Path(os.environ["DAGSTER_HOME"]).parent == bench.state_dir.parent
        bench.state_dir.mkdir()
    assert not bench.state_dir.parent.exists()
    assert os.environ["DAGSTER_HOME"] == str(tmp_path)
