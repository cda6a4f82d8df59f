from __future__ import annotations

import subprocess
import sys

import pytest

from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.suite import tiers
from branchlake_dagster_tests.suite.guard import needed
from branchlake_dagster_tests.suite.raised import raising


@pytest.mark.parametrize(
    ("marks", "fixtures", "expected"),
    [
        ((), ("tmp_path",), "unit"),
        (("timeout", "parametrize"), (), "unit"),
        ((), ("namespace", "lakehouse"), "nessie"),
        ((), ("lakehouse", "in_memory_nessie"), "lake"),
        (("nessie",), ("lakehouse", "in_memory_nessie"), "nessie"),
        ((), ("lakehouse", "in_memory_nessie", "kafka"), "spark"),
        ((), ("nessie_uri", "spark_session"), "spark"),
        (("spark",), ("lakehouse",), "spark"),
        (("daemon",), ("spark_session",), "daemon"),
        (("nessie", "chaos"), (), "chaos"),
    ],
)
def test_what_needs_most_decides(marks: tuple[str, ...], fixtures: tuple[str, ...], expected: str) -> None:
    assert tiers.tier(marks, fixtures) == expected


def test_every_test_has_one_tier(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        assert [mark.name for mark in item.iter_markers() if mark.name in tiers.TIERS] == [
            tiers.tier_of(item)
        ]


def test_the_tiers_are_the_markers(request: pytest.FixtureRequest) -> None:
    declared = {line.partition(":")[0] for line in request.config.getini("markers")}
    assert set(tiers.TIERS) <= declared


def test_what_starts_which_server_is_known() -> None:
    assert needed(["/jre/bin/java", "-Xmx768m", "-jar", "/jars/nessie-quarkus-0.99.0-runner.jar"]) == "nessie"
    assert needed(["/spark/bin/spark-submit", "--master", "local[2]"]) == "spark"
    assert needed(["/jre/bin/java", "-cp", "a.jar", "kafka.Kafka", "server.properties"]) == "spark"
    assert needed([sys.executable, "-m", "dagster", "dev", "-m", "x"]) == "daemon"
    assert needed(["/usr/lib/postgresql/15/bin/initdb", "-D", "x"]) == "daemon"
    assert needed([sys.executable, "-c", "print('dagster dev')"]) == "unit"


def test_a_unit_test_starts_no_server(tmp_path) -> None:
    with raising(pytest.fail.Exception, "unit", "nessie"):
        Lakehouse(Settings(state_dir=tmp_path / "state")).nessie.config()
    with raising(pytest.fail.Exception, "daemon"):
        subprocess.Popen([sys.executable, "-m", "dagster", "dev"])


@pytest.mark.nessie
def test_a_test_of_nessie_starts_no_spark() -> None:
    with raising(pytest.fail.Exception, "spark"):
        subprocess.Popen(["spark-submit"])
