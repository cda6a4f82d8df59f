"""`kill -9` of a consumer's run and of its publication, at each place: every token is taken once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pytest

from branchlake_dagster.cleanup.jobs import reap_branches, sweep_discarded
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.dagster_internals import COMPUTE_LOGS

pytestmark = pytest.mark.chaos

_MODULE = "branchlake_dagster_tests.incremental.killed_consumer"
_KILLED = -signal.SIGKILL


class Consumer:
    """The process that has others die, and what they work on."""

    def __init__(self, lake: Lakehouse, namespace: str) -> None:
        self.lake, self.namespace, self.tokens = lake, namespace, 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            env={**os.environ, "TEST_NAMESPACE": namespace},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def prepare(self) -> None:
        ensure_main_has_commit(self.lake.nessie)
        catalog = self.lake.catalog()
        catalog.create_namespace(self.namespace)
        catalog.create_table((self.namespace, "orders"), pa.schema([("token", pa.int64())]))

    def does(self, what: str, place: str = "-") -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(what, place, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def arrive(self) -> None:
        """More tokens come to the input on `main`."""
        new = list(range(self.tokens, self.tokens + 2))
        self.tokens += 2
        self.lake.catalog().load_table((self.namespace, "orders")).append(pa.table({"token": new}))

    def taken(self) -> list[int]:
        table = self.lake.catalog().load_table((self.namespace, "copy"))
        return sorted(table.scan().to_arrow()["token"].to_pylist())


@pytest.fixture
def consumer(tmp_path: Path, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Consumer]:
    """In a lake of its own: it is reaped as a whole."""
    home = tmp_path / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text(f"telemetry: {{enabled: false}}\n{COMPUTE_LOGS}\n")
    for name, value in {
        "BRANCHLAKE_STATE_DIR": str(tmp_path / "state"),
        "BRANCHLAKE_SESSION_KIND": "classic",
        "BRANCHLAKE_HEARTBEAT_INTERVAL_S": "0.3",
        "BRANCHLAKE_DISCARD_GRACE_H": "0.000001",
        "DAGSTER_HOME": str(home),
    }.items():
        monkeypatch.setenv(name, value)
    lake = Lakehouse(Settings())
    found = Consumer(lake, namespace)  # its process imports while the server starts
    found.prepare()
    yield found
    found.process.kill()
    found.process.communicate()
    lake.servers.stop_all()


PLACES = ("capture", "compute", "before the record", "after the record")


def reap(lake: Lakehouse) -> None:
    """What the daemon does about the dead, seven hours later."""
    later = datetime.now(UTC) + timedelta(hours=7)
    with dg.DagsterInstance.get() as instance:
        list(reap_branches(lake, instance, now=lambda: later))
        list(sweep_discarded(lake, instance, now=lambda: later))


def test_every_token_is_taken_once(consumer: Consumer) -> None:
    """A run dies after its record, a publication after its commit. All places: the next test."""
    consumer.arrive()
    assert consumer.does("consume") == consumer.does("publish") == 0
    consumer.arrive()
    assert consumer.does("consume", "after the record") == _KILLED
    consumer.arrive()
    reap(consumer.lake)
    assert {ref.name for ref in consumer.lake.nessie.references()} == {MAIN}
    assert consumer.does("consume") == 0
    assert consumer.does("publish", "after the commit") == _KILLED
    consumer.arrive()
    assert consumer.does("consume") == 0  # beside the one that is being published, or after it
    assert consumer.does("publish") == 0
    assert consumer.taken() == list(range(consumer.tokens))


@pytest.mark.soak
def test_every_token_is_taken_once_wherever_it_dies(consumer: Consumer) -> None:
    consumer.arrive()
    assert consumer.does("consume") == consumer.does("publish") == 0
    consumer.arrive()
    for place in PLACES:
        assert consumer.does("consume", place) == _KILLED, place
        consumer.arrive()
        reap(consumer.lake)
        assert {ref.name for ref in consumer.lake.nessie.references()} == {MAIN}
        assert consumer.does("publish") == 0
        assert consumer.does("consume") == 0
        assert consumer.does("publish") == 0
        assert consumer.taken() == list(range(consumer.tokens)), place
    for place in ("before the commit", "after the commit"):
        consumer.arrive()
        assert consumer.does("consume") == 0
        assert consumer.does("publish", place) == _KILLED, place
        assert consumer.does("consume") == 0  # beside the one that is being published, or after it
        assert consumer.does("publish") == 0
        assert consumer.taken() == list(range(consumer.tokens)), place
