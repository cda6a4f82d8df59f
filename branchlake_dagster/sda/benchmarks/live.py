"""`branchlake bench live`: measure the way of simulated measurements from the network to `main`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pyiceberg.exceptions import NoSuchTableError
from rich.console import Console
from rich.table import Table

from branchlake_dagster.bench.launched_run import BenchFailed, start_sensor
from branchlake_dagster.bench.own_lake import own_lake
from branchlake_dagster.bench.time_to_visibility import iter_added_rows, publication_times
from branchlake_dagster.cli.dagster_home import dagster_dev, dagster_home
from branchlake_dagster.embedded.process import LOOPBACK, choose_port
from branchlake_dagster.ingest.embedded_kafka import EmbeddedKafka
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.sda.benchmarks.receiving import COMMAND
from branchlake_dagster.settings import Settings
from branchlake_dagster.waiting import holds_within

RATES = {"radar": 1_000, "optical": 50, "isl": 100}
"""Measurements per second of each kind of sensor."""
_INGESTIONS = {
    "radar": ("radar", "raw_radar"),
    "optical": ("optical", "raw_optical"),
    "isl": ("links", "raw_links"),
}
"""The ingestion of each kind of sensor, and its table."""
_MODULE = "branchlake_dagster.definitions"
_ROW = ("topic_partition", "topic_offset", "received_at")
_DEAD = ("partition", "offset")
_QUIET_S, _BEHIND_S = 10.0, 300.0
_FIRST_S = 60.0


def measure_live(
    settings: Settings, *, seconds: float, bursts: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """Send measurements of three kinds at once, and report by kind how many arrived and how fast.

    The benchmark uses a separate state folder and a real Dagster daemon. Raises BenchFailed if a process ends
    early.

    Args:
        settings: The settings of the lake.
        seconds: How long the simulator sends.
        bursts: Whether to send ten times as much for a minute, first after two minutes and then every five.
        say: Called with lines of progress.

    Returns:
        Figures by kind of sensor. ``sent`` is counted by the simulator, ``received`` and ``dropped`` by the
            receivers. ``rows`` and ``dead_letters`` are counted on `main` after the last arrival. ``lost``
            records were handed over to Kafka and are neither rows nor dead letters; ``doubled`` counts
            additional copies of records. ``p50_s`` and ``p99_s`` are quantiles of the time from receipt to
            the commit on `main`; ``later_…`` leaves out the first minute, in which runs and Spark sessions
            start.
    """
    with own_lake(settings) as bench, ExitStack() as ending:
        lake, kafka = Lakehouse(bench, say=say), EmbeddedKafka(bench, say=say)
        ending.callback(lake.servers.stop_all)
        ending.callback(kafka.down)
        lake.endpoints()
        ensure_main_has_commit(lake.nessie)
        return _Trial(lake, kafka.up(), bench.state_dir.parent, say).measure(seconds, bursts)


@dataclass
class _Trial:
    lake: Lakehouse
    brokers: str
    folder: Path
    say: Callable[[str], None]

    def measure(self, seconds: float, bursts: bool) -> dict[str, Any]:
        pages = f"{LOOPBACK}:{choose_port(0, setting='the port of the simulated telescopes')}"
        with ExitStack() as stack:
            sources = ["--radar", f"{LOOPBACK}:0", "--isl", f"{LOOPBACK}:0", "--monitor", f"{LOOPBACK}:0"]
            sources += ["--optical", f"http://{pages}/observations", "--kafka", self.brokers]
            receiver = stack.enter_context(self._command("receive", *sources))
            ready = receiver.read_line()
            at = {
                topic.removeprefix("sda.").partition("/")[0]: one for topic, one in ready["sources"].items()
            }
            self._start_sensors(stack, ready["monitor"])
            rates = [word for kind, rate in RATES.items() for word in ("--rate", f"{kind}={rate}")]
            often = ["--burst-every-s", "300", "--burst-first-s", "120"] if bursts else []
            began = time.time()
            simulator = stack.enter_context(
                self._command(
                    *("simulate", "--radar", at["radar"], "--isl", at["isl"], "--optical", pages),
                    *(*rates, *often, "--seconds", f"{seconds:g}"),
                )
            )
            self._wait(began, seconds, receiver, simulator)
            received = receiver.end()
            handed_over = sum(one["handed_over"] for one in received["intakes"])
            holds_within(_BEHIND_S, lambda: sum(map(sum, self._count_rows())) >= handed_over, every_s=1.0)
            sent = simulator.end()
        accounts = {one["topic"].removeprefix("sda."): one for one in received["intakes"]}
        return {
            "seconds": seconds,
            "kinds": {
                kind: self._count_outcomes(kind, sent["kinds"][kind], accounts[kind], began) for kind in RATES
            },
        }

    def _start_sensors(self, stack: ExitStack, monitor: str) -> None:
        environment = {
            "BRANCHLAKE_STATE_DIR": str(self.lake.settings.state_dir),
            "BRANCHLAKE_KAFKA_BOOTSTRAP": self.brokers,
            "BRANCHLAKE_LIVE_SENSORS": "kafka",
            "BRANCHLAKE_RECEIVERS": monitor,
        }
        home = Path(dagster_home(self.lake.settings))
        url = stack.enter_context(dagster_dev(_MODULE, home=home, environment=environment))
        for ingestion, _ in _INGESTIONS.values():
            start_sensor(url, _MODULE, f"ingest_{ingestion}_live_sensor")

    def _wait(self, began: float, seconds: float, *processes: _Command) -> None:
        """Wait until everything is sent and no more records reach `main`.

        Raises BenchFailed if one of the processes has ended.
        """
        before, since = (0, 0), time.time()
        while time.time() - began < seconds or time.time() - since < _QUIET_S:
            if time.time() - began > seconds + _BEHIND_S:
                break
            time.sleep(2.0)
            for one in processes:
                one.require()
            counts = self._count_rows()
            if (now := (sum(rows for rows, _ in counts), sum(dead for _, dead in counts))) != before:
                before, since = now, time.time()
                self.say(f"{time.time() - began:.0f} s: {now[0]:,} rows and {now[1]:,} dead letters on main")

    def _count_rows(self) -> list[tuple[int, int]]:
        """Return the rows and dead letters of each kind on `main`, from the tables' metadata."""
        return [
            (self._count_records(("sda", table)), self._count_records(("sda", f"{ingestion}_dead_letters")))
            for ingestion, table in _INGESTIONS.values()
        ]

    def _count_records(self, identifier: tuple[str, ...]) -> int:
        try:
            snapshot = self.lake.catalog(MAIN).load_table(identifier).current_snapshot()
        except NoSuchTableError:
            return 0
        summary = snapshot.summary if snapshot is not None else None
        return int(summary["total-records"] or 0) if summary is not None else 0

    def _count_outcomes(
        self, kind: str, sent: Mapping[str, Any], account: Mapping[str, Any], began: float
    ) -> dict[str, Any]:
        ingestion, table = _INGESTIONS[kind]
        rows = self._record_positions(("sda", table), _ROW[:2])
        dead = self._record_positions(("sda", f"{ingestion}_dead_letters"), _DEAD)
        at = publication_times(self.lake, ("sda", table))
        waits, received = [np.empty(0)], [np.empty(0)]
        # Snapshots expire after about an hour; their rows are missing in the delays.
        for snapshot, added in iter_added_rows(self.lake.catalog(MAIN).load_table(("sda", table)), _ROW[2:]):
            came = added["received_at"].to_numpy().astype("datetime64[us]").astype(np.int64) / 1e6
            received.append(came)
            waits.append(at[snapshot.snapshot_id] - came)
        there, delays = np.concatenate([rows, dead]), np.concatenate(waits)
        later = delays[np.concatenate(received) >= began + _FIRST_S]
        once = len(np.unique(there))
        return {
            "sent": sent.get("delivered", sent["sent"]),
            "received": account["received"],
            "dropped": account["dropped"],
            "rows": len(rows),
            "dead_letters": len(dead),
            "lost": account["handed_over"] - once,
            "doubled": len(there) - once,
            "publications": len(at),
            "p50_s": _quantile(delays, 0.5),
            "p99_s": _quantile(delays, 0.99),
            "later_p50_s": _quantile(later, 0.5),
            "later_p99_s": _quantile(later, 0.99),
        }

    def _record_positions(
        self, identifier: tuple[str, ...], columns: tuple[str, str]
    ) -> np.ndarray[Any, Any]:
        """Return partition and offset of each row of a table, combined in one number."""
        try:
            rows = self.lake.catalog(MAIN).load_table(identifier).scan(selected_fields=columns).to_arrow()
        except NoSuchTableError:
            return np.empty(0, np.int64)
        partition, offset = (rows[name].to_numpy().astype(np.int64) for name in columns)
        found: np.ndarray[Any, Any] = partition << 40 | offset
        return found

    @contextmanager
    def _command(self, *arguments: str) -> Iterator[_Command]:
        """Run a `branchlake` command in a separate process, which is killed at the end of the block.

        The file `<command>.log` gets its standard error.
        """
        with (
            (self.folder / f"{arguments[0]}.log").open("wb") as log,
            subprocess.Popen(
                [sys.executable, "-c", COMMAND, *arguments, "--json"],
                # The state folder contains the broker's password.
                env={**os.environ, "BRANCHLAKE_STATE_DIR": str(self.lake.settings.state_dir)},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            ) as process,
        ):
            try:
                yield _Command(process, Path(log.name))
            finally:
                process.kill()


@dataclass(frozen=True)
class _Command:
    process: subprocess.Popen[str]
    log: Path

    def read_line(self) -> dict[str, Any]:
        """Return the next line of output, decoded from JSON. Raises BenchFailed if the process has ended."""
        return self._read(self.process.stdout.readline() if self.process.stdout is not None else "")

    def require(self) -> None:
        """Raise BenchFailed if the process has ended."""
        if self.process.poll() is not None:
            self._read("")

    def end(self) -> dict[str, Any]:
        """Terminate the process and return its final report. Raises BenchFailed if it writes none."""
        self.process.terminate()
        return self._read(self.process.communicate(timeout=60)[0])

    def _read(self, text: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise BenchFailed(f"branchlake {self.log.stem} ended: {self.log.read_text()[-500:]}") from error
        return found


def _quantile(delays: np.ndarray[Any, Any], share: float) -> float | None:
    return round(float(np.quantile(delays, share)), 2) if len(delays) else None


def print_live(found: dict[str, Any]) -> None:
    """Print the figures as a table."""
    table = Table("", *found["kinds"], title=f"live sensors, {found['seconds']:g} s")
    for key in next(iter(found["kinds"].values())):
        values = [found["kinds"][kind][key] for kind in found["kinds"]]
        table.add_row(
            key,
            *(json.dumps(v) if isinstance(v, dict) else str(v) if v is None else f"{v:,}" for v in values),
        )
    Console().print(table)
