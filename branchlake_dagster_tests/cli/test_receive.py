"""`branchlake receive` and `branchlake simulate` as processes: ended, killed, started again."""

from __future__ import annotations

import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from branchlake_dagster.cli.main import main
from branchlake_dagster.embedded.process import choose_port
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.receivers.landing import Landing
from branchlake_dagster.sda.benchmarks.receiving import measure_receiving
from branchlake_dagster.sda.commands.receive import kafka_options
from branchlake_dagster_tests.receivers.harness import landed
from branchlake_dagster_tests.suite import soak
from branchlake_dagster_tests.suite.json_contract import check_output
from branchlake_dagster_tests.suite.raised import raising

COMMAND = [sys.executable, "-c", "from branchlake_dagster.cli import main; main()"]
ANYWHERE = "127.0.0.1:0"


class Running:
    """A receiver's process, ready."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "receive", "--monitor", ANYWHERE, "--json", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()
        check_output(["sda", "receive", "--json"], line)
        self.ready = json.loads(line)

    def address(self, topic: str) -> tuple[str, int]:
        host, port = self.ready["sources"][topic].split(":")
        return host, int(port)

    def end(self, number: signal.Signals = signal.SIGTERM) -> dict[str, Any]:
        self.process.send_signal(number)
        out, told = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, told
        check_output(["sda", "receive", "--json"], out)
        return {one["topic"]: one for one in json.loads(out)["intakes"]}


@contextmanager
def receiving(*options: str) -> Iterator[Running]:
    running = Running(*options)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        for stream in (running.process.stdout, running.process.stderr):
            assert stream is not None
            stream.close()


def framed(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_was_accepted_is_in_the_files_after_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    # Files are finished after an hour, so that only the end can finish them.
    with (
        receiving(
            *("--radar", ANYWHERE, "--isl", ANYWHERE, "--landing", str(tmp_path), "--roll-s", "3600")
        ) as running,
        socket.create_connection(running.address("sda.isl/0")) as stream,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        datagrams.connect(running.address("sda.radar/0"))
        for sent in range(3_000):
            stream.sendall(framed(b"%d" % sent))
            datagrams.send(b"%d" % sent)
        time.sleep(0.5)
        assert Landing(tmp_path).offsets("sda.isl", 0) == (0, 0)
        done = running.end(number)
    expected = [b"%d" % sent for sent in range(3_000)]
    assert landed(tmp_path, "sda.isl")["value"].to_pylist() == expected
    assert landed(tmp_path, "sda.radar")["value"].to_pylist() == expected
    for one in done.values():
        assert (one["received"], one["handed_over"], one["dropped"]) == (3_000, 3_000, {})


@pytest.mark.chaos
def test_killed_in_the_middle_and_started_again(tmp_path: Path) -> None:
    """No gap and no double in the offsets, whole files only, and what lies in them stays."""
    options = ("--isl", ANYWHERE, "--landing", str(tmp_path), "--roll-s", "0.02")
    sent, seen = 0, 0
    for _ in range(4 if soak.soaking() else 2):
        with receiving(*options) as running:
            before = landed(tmp_path, "sda.isl").num_rows if seen else 0
            assert before >= seen, "what was durable is there"
            stop = threading.Event()
            first = sent

            def send(address: tuple[str, int], stop: threading.Event) -> None:
                nonlocal sent
                with socket.create_connection(address) as stream:
                    while not stop.is_set():
                        try:
                            stream.sendall(framed(b"%08d" % sent))
                        except OSError:
                            return
                        sent += 1

            sender = threading.Thread(target=send, args=(running.address("sda.isl/0"), stop))
            sender.start()
            landing = Landing(tmp_path)
            while landing.offsets("sda.isl", 0)[1] < before + 2_000:
                time.sleep(0.005)
            running.process.kill()
            running.process.wait()  # it may be in the middle of a rename
            stop.set()
            sender.join()
            seen = landing.offsets("sda.isl", 0)[1]
        values = [int(one) for one in landed(tmp_path, "sda.isl")["value"].to_pylist()[before:]]
        assert values == list(range(first, first + len(values))), "the begin of what was sent, in order"
    with receiving(*options) as running:
        running.end()
    folder = tmp_path / "sda.isl" / "0"
    assert not list(folder.glob("*.tmp")), "the next one cleans up"
    assert all(pq.read_metadata(file).num_rows for file in folder.glob("*.parquet"))
    assert landed(tmp_path, "sda.isl").num_rows == seen


@pytest.mark.chaos
def test_pages_are_had_once_across_kills(tmp_path: Path) -> None:
    port = choose_port(0, setting="the port of the tests' pages")
    simulator = subprocess.Popen(
        [
            *(*COMMAND, "simulate", "--optical", f"127.0.0.1:{port}", "--rate", "optical=800"),
            *(
                "--seconds",
                "3",
                "--objects",
                "200",
                "--start",
                "2026-08-08T00:00",
                "--stragglers",
                "0",
                "--json",
            ),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    options = (
        "--optical",
        f"http://127.0.0.1:{port}/observations",
        "--landing",
        str(tmp_path),
        "--roll-s",
        "0.05",
    )
    try:
        landing = Landing(tmp_path)
        for most in (1, 1_000):
            with receiving(*options) as running:
                while "sda.optical" not in landing.topics() or landing.offsets("sda.optical", 0)[1] < most:
                    time.sleep(0.005)
                running.process.kill()
        with receiving(*options) as running:
            while landing.offsets("sda.optical", 0)[1] < 2_400:
                time.sleep(0.01)
            running.end()
    finally:
        simulator.terminate()
        out, _ = simulator.communicate(timeout=60)
    check_output(["sda", "simulate", "--json"], out)
    tally = json.loads(out)["kinds"]["optical"]
    values = landed(tmp_path, "sda.optical")["value"].to_pylist()
    assert tally["measured"] == 2_400
    assert len(values) == len(set(values)) == 2_400


@pytest.mark.chaos
def test_into_kafka_and_on_from_there(kafka: str) -> None:
    """The mock cluster of librdkafka, which lives in this process, and receivers in others."""
    port = choose_port(0, setting="the port of the tests' pages")
    simulator = subprocess.Popen(
        [
            *(*COMMAND, "simulate", "--optical", f"127.0.0.1:{port}", "--rate", "optical=300"),
            *("--seconds", "3", "--objects", "200", "--start", "2026-08-08T00:00", "--stragglers", "0"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    options = ("--optical", f"http://127.0.0.1:{port}/observations", "--isl", ANYWHERE, "--kafka", kafka)
    try:
        for most in (1, 900):
            with (
                receiving(*options) as running,
                socket.create_connection(running.address("sda.isl")) as stream,
            ):
                for number in range(100):
                    stream.sendall(framed(struct.pack("<IIQ", 1, number, number)))
                while len(consumed(kafka, "sda.optical")) < most:
                    time.sleep(0.05)
                if most > 1:
                    assert running.end()["sda.isl"]["handed_over"] == 100
    finally:
        simulator.terminate()
        simulator.wait(timeout=60)
    values = consumed(kafka, "sda.optical")
    assert len(values) == len(set(values)) == 900


def consumed(kafka: str, topic: str) -> list[bytes]:
    consumer = ck.Consumer({"bootstrap.servers": kafka, "group.id": "test"})
    try:
        _, high = consumer.get_watermark_offsets(ck.TopicPartition(topic, 0), timeout=10)
        consumer.assign([ck.TopicPartition(topic, 0, 0)])
        found: list[bytes] = []
        while len(found) < high:
            found += [
                one.value() or b"" for one in consumer.consume(high, timeout=0.2) if one.error() is None
            ]
        return found
    finally:
        consumer.close()


@pytest.fixture
def kafka() -> Iterator[str]:
    owner = ck.Producer({"test.mock.num.brokers": 1})
    (broker,) = owner.list_topics(timeout=10).brokers.values()
    yield f"{broker.host}:{broker.port}"
    owner.flush(1)


@pytest.mark.long
def test_a_second_receiver_of_the_same_partition_is_refused(tmp_path: Path) -> None:
    options = ("--radar", ANYWHERE, "--landing", str(tmp_path))
    with receiving(*options):
        done = subprocess.run(
            [*COMMAND, "receive", "--monitor", ANYWHERE, *options], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert str(tmp_path) in done.stderr


def test_simulated_sensors_into_files(tmp_path: Path) -> None:
    rates = [text for kind in ("radar=200", "optical=20", "isl=20") for text in ("--rate", kind)]
    done = CliRunner().invoke(
        main,
        ["simulate", "--landing", str(tmp_path), "--seconds", "10", "--objects", "1000", *rates, "--json"],
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["kinds"]
    assert {kind: one["measured"] for kind, one in told.items()} == {
        "radar": 2_000,
        "optical": 200,
        "isl": 200,
    }
    for kind, one in told.items():
        assert landed(tmp_path, f"sda.{kind}").num_rows == one["sent"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["receive", "--radar", ANYWHERE], "--landing FOLDER or --kafka BROKERS"),
        (["receive", "--landing", "x", "--kafka", "b:1"], "one of them"),
        (["receive", "--landing", "x"], "Name a source"),
        (["receive", "--landing", "x", "--radar", "here"], "'here'"),
        (["simulate"], "or else --landing"),
        (["simulate", "--radar", ANYWHERE, "--kafka", "b:1"], "or else --landing"),
        (["simulate", "--landing", "x"], "fill the disk"),
        (["simulate", "--landing", "x", "--seconds", "1", "--rate", "sonar=1"], "'sonar=1'"),
        (["simulate", "--landing", "x", "--seconds", "1", "--corrupted", "2"], "A share"),
        (["simulate", "--landing", "x", "--seconds", "1", "--start", "soon"], "not a time"),
    ],
)
def test_options_that_make_no_sense(options: list[str], told: str) -> None:
    done = CliRunner().invoke(main, options)
    assert done.exit_code == 2
    assert told in done.output


def test_options_of_kafka_come_from_a_file_and_are_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "kafka.properties"
    file.write_text("# ours\n\nsecurity.protocol = SASL_SSL\nsasl.password=a=b\n")
    assert kafka_options("h:1", file) == {
        "security.protocol": "SASL_SSL",
        "sasl.password": "a=b",
        "bootstrap.servers": "h:1",
    }
    file.write_text("secret\n")
    with raising(ConfigurationError, 1, reason="kafka_option", subject=str(file)) as caught:
        kafka_options("h:1", file)
    assert "secret" not in str(caught.value)


@pytest.mark.long
def test_the_bench_accounts_for_every_record() -> None:
    found = measure_receiving(seconds=0.3, roll_s=0.05, quiet_s=5.0, say=lambda _: None)
    assert set(found) == {"udp", "tcp", "http"}
    check_output(["bench", "receive", "--json"], json.dumps(found))
    for one in found.values():
        assert one["unaccounted"] == one["paced_unaccounted"] == 0
        assert one["records_per_s"] > 0
        assert 0 < one["p50_s"] <= one["p99_s"]
