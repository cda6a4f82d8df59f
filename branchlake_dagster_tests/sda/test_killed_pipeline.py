"""`kill -9` in each stage of the space pipeline, and around its publication: every alert is there exactly once.

Only `make test-soak` runs these tests.
`BRANCHLAKE_TEST_SHUFFLE_SEED` is the seed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest

from branchlake_dagster.cleanup.jobs import reap_branches, sweep_discarded
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.heartbeats import HeartbeatStore
from branchlake_dagster.sda.assets.alerts import CONJUNCTION_ALERTS
from branchlake_dagster_tests.dagster_internals import COMPUTE_LOGS
from branchlake_dagster_tests.sda.killed_pipeline import HOUR, NOWHERE, PUBLICATION, STAGES
from branchlake_dagster_tests.sda.shuffled_bytes import (
    GP_FOLDER,
    Pipeline,
    SimulatedBytes,
    Tables,
    crossing_objects,
    cut,
    simulate_bytes,
)
from branchlake_dagster_tests.sda.test_registry_lake import empty_lake
from branchlake_dagster_tests.sda.test_reprocessed_bytes import is_consistent
from branchlake_dagster_tests.suite.soak import soaking

__all__ = ["empty_lake"]

pytestmark = [pytest.mark.spark, pytest.mark.chaos, pytest.mark.timeout(3_600)]

START = datetime(2026, 8, 8, 3, tzinfo=UTC)
SEED = int(os.environ.get("BRANCHLAKE_TEST_SHUFFLE_SEED", "0"))
_MODULE = "branchlake_dagster_tests.sda.killed_pipeline"
_KILLED = -signal.SIGKILL
COMMITTED = ("after the branch write", "before the position", "after the position")
"""The places where all files of the stage's first table are in a commit of its branch."""
PAIRS, RADAR_PER_S = (15, 0.3) if soaking() else (8, 0.1)
RANDOM_KILLS = 3
"""Of each stage, at random times."""


class Workers:
    """Processes that compute stages one after the other, and die where they are told to."""

    def __init__(self, folder: Path, hour: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", _MODULE],
            env={**os.environ, GP_FOLDER: str(folder), HOUR: hour},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def does(self, stage: str, place: str = NOWHERE) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(stage, place, sep="\t", file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def publishes(self, stage: str) -> float:
        """Compute and publish a stage; the seconds of its computation."""
        began = time.monotonic()
        assert self.does(stage) == 0, stage
        took = time.monotonic() - began
        assert self.does("publish") == 0, stage
        return took


@dataclass
class Trial:
    """A pipeline with a catalog, processes that work on it, and the tables of an undisturbed chain."""

    pipeline: Pipeline
    workers: Workers
    expected: Tables
    simulated: SimulatedBytes
    chance: random.Random
    foreign: set[str]
    """References that earlier tests left in the lake."""

    @property
    def lake(self) -> Lakehouse:
        return self.pipeline.lake

    def files(self) -> set[Path]:
        root = Path(self.lake.settings.warehouse_uri.removeprefix("file://"))
        return {path for path in (root / "sda").rglob("*") if path.is_file()}

    def kill(self, stage: str, place: str) -> bool:
        """Kill a stage there, and do what the daemon does about it. Return whether the process was killed.

        Nothing is on `main`, and no branch and no committed file is left. Data files that were not committed
        yet stay: no table names them.
        """
        before, files = self.lake.nessie.reference(MAIN).hash, self.files()
        killed = self.workers.does(stage, place)
        assert killed == _KILLED or place.startswith("during"), (stage, place, killed)
        if killed == 0:
            return False
        assert self.lake.nessie.reference(MAIN).hash == before, (stage, place)
        self.clean_up()
        assert self.references() == {MAIN}, (stage, place)
        left = self.files() - files
        if place in COMMITTED:
            assert not left, (stage, place, left)
        elif not place.startswith("during"):
            assert {path.suffix for path in left} <= {".parquet", ".crc"}, (stage, place, left)
        print(f"{stage}, {place}: {len(left)} uncommitted files left")  # noqa: T201 - how many are usual
        return True

    def clean_up(self) -> None:
        """What the daemon does about the dead, seven hours later."""
        later = datetime.now(UTC) + timedelta(hours=7)
        with dg.DagsterInstance.get() as instance:
            list(reap_branches(self.lake, instance, now=lambda: later))
            list(sweep_discarded(self.lake, instance, now=lambda: later))

    def references(self) -> set[str]:
        return {reference.name for reference in self.lake.nessie.references()} - self.foreign

    def kill_publications(self, stage: str, *places: str) -> None:
        """Kill the processes that publish a computed stage. Then compute it a second time, and publish both."""
        before = self.lake.nessie.reference(MAIN).hash
        for place in places:
            assert self.workers.does("publish", place) == _KILLED, (stage, place)
            assert (self.lake.nessie.reference(MAIN).hash == before) == place.startswith("before")
        assert self.workers.does(stage) == 0
        assert self.workers.does("publish") == 0
        self.clean_up()  # of two runs one may be refused
        assert self.references() == {MAIN}

    def is_undisturbed(self) -> None:
        """All tables and the alerts that hold are those of an undisturbed chain, and nothing is left."""
        with self.pipeline.project() as p:
            self.pipeline.finish(p, self.simulated)
        differences = self.expected.differences(self.pipeline.read())
        assert not differences, "\n".join([f"seed {SEED}", *differences])
        is_consistent(self.pipeline.log(), self.lake)
        assert self.references() == {MAIN}
        assert HeartbeatStore.from_settings(self.lake.settings).all() == ()
        assert not [name for name in self.lake.catalog(MAIN).list_tables("sda") if "__staged_" in name[-1]]


@pytest.fixture
def trial(empty_lake: Lakehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    print(f"seed {SEED}")  # noqa: T201 - a failure is repeated by it
    home = tmp_path / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text(f"telemetry: {{enabled: false}}\n{COMPUTE_LOGS}\n")
    pipeline = Pipeline(empty_lake, tmp_path)
    for name, value in {
        "BRANCHLAKE_STATE_DIR": str(empty_lake.settings.state_dir),
        "BRANCHLAKE_LANDING": str(pipeline.landing),
        "BRANCHLAKE_HEARTBEAT_INTERVAL_S": "0.3",
        "BRANCHLAKE_DISCARD_GRACE_H": "0.000001",
        "DAGSTER_HOME": str(home),
    }.items():
        monkeypatch.setenv(name, value)
    chance = random.Random(SEED)
    elements = crossing_objects(START, pairs=PAIRS, seed=SEED)
    rates = {"radar": RADAR_PER_S, "optical": 0.05, "isl": 0.05}
    simulated = simulate_bytes(elements, START, hours=1, per_s=rates, seed=SEED)
    (hour,) = simulated.partitions
    workers = Workers(pipeline.gp, hour)
    foreign = {reference.name for reference in empty_lake.nessie.references()} - {MAIN}
    try:
        pipeline.publish_catalog(elements, START)
        expected = pipeline.compute(simulated, None, 1)
        assert expected.frames["net_alerts"].height
        yield Trial(pipeline, workers, expected, simulated, chance, foreign)
    finally:
        workers.process.kill()
        workers.process.communicate()


@pytest.mark.soak
def test_a_killed_process_makes_no_alert_twice(trial: Trial) -> None:
    """The alerts of the hour are computed anew, from nothing, by processes that are killed."""
    trial.lake.catalog(MAIN).drop_table(tuple(CONJUNCTION_ALERTS.path))
    place, publication = trial.chance.choice([*STAGES["alerts"]]), trial.chance.choice([*PUBLICATION])
    print(f"killed at: {place}, {publication}")  # noqa: T201 - a failure is repeated by it
    trial.kill("alerts", place)
    assert trial.workers.does("alerts") == 0
    trial.kill_publications("alerts", publication)
    trial.is_undisturbed()


@pytest.mark.soak
def test_processes_killed_at_every_place_make_no_difference(trial: Trial) -> None:
    """The second half of the bytes changes what the first one gave, so that the kills are in corrections."""
    trial.pipeline.remove_measurements()
    first, second = cut(trial.chance, trial.simulated.records, 2)
    trial.pipeline.land(first)
    seconds = {stage: trial.workers.publishes(stage) for stage in STAGES}
    before = trial.pipeline.log()
    assert before.height
    trial.pipeline.land(second)
    for stage, places in STAGES.items():
        for place in places:
            trial.kill(stage, place)
        for number in range(RANDOM_KILLS):
            after = trial.chance.uniform(0.1, 0.9) * seconds[stage]
            if not trial.kill(stage, f"during {after:.3f}"):
                print(f"{stage}, kill {number}: it was ready before")  # noqa: T201 - how often it happens
                break
        else:
            assert trial.workers.does(stage) == 0
        trial.kill_publications(stage, *PUBLICATION)
    trial.is_undisturbed()
    assert trial.pipeline.log().height > before.height
