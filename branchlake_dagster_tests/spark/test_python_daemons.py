"""Spark's Python daemons do not pile up."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from branchlake_dagster.embedded.process import ProcessRecord, find_start_s
from branchlake_dagster.spark import session as python_daemons
from branchlake_dagster.waiting import holds_within

# A server with two daemons, of which one has a worker, and with a child of another kind.
_SERVER = """
import subprocess, sys, time
sleep = "import time; time.sleep(120)"
busy = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)']); time.sleep(120)"
for code, name in ((sleep, "pyspark.daemon"), (busy, "pyspark.daemon"), (sleep, "other")):
    subprocess.Popen([sys.executable, "-c", code, name])
time.sleep(120)
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[psutil.Process]:
    monkeypatch.setattr(python_daemons, "_last_checks", {})
    with subprocess.Popen([sys.executable, "-c", _SERVER]) as made:
        tree = psutil.Process(made.pid)
        try:
            assert holds_within(60.0, lambda: len(tree.children(recursive=True)) == 4, every_s=0.05)
            yield tree
        finally:
            for one in [*tree.children(recursive=True), tree]:
                one.kill()


def test_a_daemon_without_workers_is_ended(server: psutil.Process) -> None:
    started = find_start_s(server.pid)
    assert started is not None
    record = ProcessRecord("spark", server.pid, started, 1)
    assert python_daemons.end_idle_daemons(record) == 0  # they are young
    later = time.time() + 10_000
    assert python_daemons.end_idle_daemons(record, now=lambda: later) == 1
    assert python_daemons.end_idle_daemons(record, now=lambda: later) == 0  # once a minute

    def alive() -> int:
        return sum(one.status() != psutil.STATUS_ZOMBIE for one in server.children(recursive=True))

    assert holds_within(30.0, lambda: alive() == 3, every_s=0.05)


def test_a_server_that_is_gone_is_left_alone() -> None:
    assert python_daemons.end_idle_daemons(ProcessRecord("spark", 1, 0.0, 1)) == 0
