"""An embedded Kafka broker for trials and tests: one node on loopback, with a login of its own.

A Kafka broker of our own: Apache Kafka in KRaft mode, one node, on loopback, for trials and tests.

It lives in the state folder beside the other embedded servers: `kafka/` has its log, `run/kafka.json` its
process, `run/kafka.password` the password that it asks for, `logs/kafka.log` what it logs. Nothing starts
it by itself; `branchlake up --with kafka` does.

The login of the embedded broker: one user, whose password is in the state folder for its owner alone.

Other accounts of the machine reach the loopback address too. Both listeners of the broker ask for SASL PLAIN:
that of clients, and that of the controller, which takes commands as well.
"""

from __future__ import annotations

import base64
import secrets
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from branchlake_dagster.embedded import process
from branchlake_dagster.embedded.jars import Jar, resolve_class_path, resolve_jars
from branchlake_dagster.embedded.java import bundled_java
from branchlake_dagster.embedded.logs import rotate_by_copy
from branchlake_dagster.embedded.process import (
    LOOPBACK,
    ProcessRecord,
    ServerDidNotStart,
    choose_port,
    keep_port,
)
from branchlake_dagster.embedded.state_folder import make_private_folder, make_state_folder, write_secret
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.file_lock import file_lock
from branchlake_dagster.ingest.kafka_cluster import KafkaCluster
from branchlake_dagster.settings import Settings

BROKER_USER = "branchlake"
CLIENT_LISTENER, CONTROLLER_LISTENER = "LOCAL", "CONTROLLER"
"""Names of the broker's two listeners."""
_SECURITY_PROTOCOL, _SASL_MECHANISM = "SASL_PLAINTEXT", "PLAIN"
_LOGIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"


class BrokerLogin:
    """The login of the broker of one state folder.

    `run/kafka.password` has the password, and `run/kafka.properties` what Kafka's own console tools need.
    """

    def __init__(self, root: Path) -> None:
        self._password_path = root / "run" / "kafka.password"
        self.client_properties = root / "run" / "kafka.properties"

    @property
    def exists(self) -> bool:
        """Whether a password is stored."""
        return self._stored_password() is not None

    def create_password(self) -> str:
        """Return the password, created if there is none, and write the file for Kafka's console tools."""
        password = self._stored_password() or secrets.token_urlsafe(24)
        write_secret(self._password_path, password)
        login = f'{_LOGIN_MODULE} required username="{BROKER_USER}" password="{password}";'
        write_secret(
            self.client_properties,
            f"security.protocol={_SECURITY_PROTOCOL}\nsasl.mechanism={_SASL_MECHANISM}\nsasl.jaas.config={login}\n",
        )
        return password

    def cluster(self, address: str) -> KafkaCluster:
        """Return the broker at `address` with its login.

        Without a password if none is stored: the broker that runs was started by a release that had none.
        """
        password = self._stored_password()
        return (
            KafkaCluster(address, _SECURITY_PROTOCOL, _SASL_MECHANISM, BROKER_USER, password)
            if password
            else KafkaCluster(address)
        )

    def _stored_password(self) -> str | None:
        try:
            return self._password_path.read_text().strip() or None
        except FileNotFoundError:
            return None


def login_properties(password: str) -> Mapping[str, str]:
    """Return the broker's properties that make both listeners ask for the login.

    The password is in them: write them only into a file that nobody else can read.
    """
    login = f'{_LOGIN_MODULE} required username="{BROKER_USER}" password="{password}" user_{BROKER_USER}="{password}";'
    properties = {
        "listener.security.protocol.map": f"{CLIENT_LISTENER}:{_SECURITY_PROTOCOL},{CONTROLLER_LISTENER}:{_SECURITY_PROTOCOL}",
        "inter.broker.listener.name": CLIENT_LISTENER,
        "sasl.mechanism.inter.broker.protocol": _SASL_MECHANISM,
        "sasl.mechanism.controller.protocol": _SASL_MECHANISM,
    }
    for listener in (CLIENT_LISTENER, CONTROLLER_LISTENER):
        prefix = f"listener.name.{listener.lower()}"
        properties |= {
            f"{prefix}.sasl.enabled.mechanisms": _SASL_MECHANISM,
            f"{prefix}.plain.sasl.jaas.config": login,
        }
    return properties


KAFKA = "kafka"
_APPENDED_PROPERTIES = ("listeners", "advertised.listeners", "listener.security.protocol.map")
BROKER = Jar("org.apache.kafka", "kafka_2.13", "4.1.1", megabytes=40)
BROKER_LOGGING = Jar("org.apache.logging.log4j", "log4j-slf4j-impl", "2.24.3")
"""The broker brings none, and would say nothing of why it does not start."""
_LOG4J = """# Written by branchlake at each start of the broker.
rootLogger.level = info
rootLogger.appenderRef.stdout.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n
"""


class EmbeddedKafka:
    """The broker of one state folder. Safe to use from several processes at once.

    `more` are properties of the broker beside ours; further listeners come after ours, which asks for the
    password.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        extra_properties: Mapping[str, str] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._root = settings.state_dir
        self._login = BrokerLogin(self._root)
        self._extra_properties = extra_properties or {}
        self._say = say

    def running(self) -> str | None:
        """Its address, `host:port`, if it runs. Rotates its log if that is large."""
        rotate_by_copy(self.log_path)
        record = ProcessRecord.load(self.record_path)
        if record and record.is_alive() and process.is_listening(record.port):
            return f"{LOOPBACK}:{record.port}"
        return None

    def up(self) -> str:
        """Its address; it is started if it does not run. Raises ServerDidNotStart or DownloadFailed."""
        if address := self.running():
            return address
        with self._lock():
            return self.running() or self._start()

    def cluster(self) -> KafkaCluster:
        """The broker with its login; it is started if it does not run. Raises as `up`."""
        return self._login.cluster(self.up())

    def running_cluster(self) -> KafkaCluster | None:
        """The broker with its login, if it runs."""
        address = self.running()
        return self._login.cluster(address) if address else None

    def down(self) -> bool:
        """Stop it; whether it ran. Its topics stay."""
        if not self.record_path.exists():
            return False
        with self._lock():
            record = ProcessRecord.load(self.record_path)
            stopped = bool(record and process.stop_process(record))
            self.record_path.unlink(missing_ok=True)
        return stopped

    @property
    def requires_password(self) -> bool:
        """Whether clients log in. A broker that an earlier release started has no login before it ends."""
        return self._login.exists

    @property
    def client_properties(self) -> Path:
        """The file with the login for Kafka's own console tools, which only the owner can read."""
        return self._login.client_properties

    @property
    def record(self) -> ProcessRecord | None:
        """Its process, if it runs."""
        return ProcessRecord.load(self.record_path) if self.running() else None

    @property
    def log_path(self) -> Path:
        """What it says."""
        return self._root / "logs" / f"{KAFKA}.log"

    @property
    def record_path(self) -> Path:
        """Where its process is recorded; there is no file where it was never started."""
        return self._root / "run" / f"{KAFKA}.json"

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with file_lock(make_private_folder(self._root / "run") / f"{KAFKA}.lock"):
            yield

    def _start(self) -> str:
        stale_record = ProcessRecord.load(self.record_path)
        if stale_record and process.stop_process(stale_record):
            self._say(f"Stopped a Kafka broker that did not answer (pid {stale_record.pid}).")
        port_path = self.record_path.with_suffix(".port")
        port = keep_port(self._settings.kafka_port, port_path, setting="BRANCHLAKE_KAFKA_PORT")
        controller_port = choose_port(0, setting="the port of Kafka's controller")
        home = make_private_folder(self._root / KAFKA)
        class_path = self._class_path()
        configuration = home / "server.properties"
        password = self._login.create_password()
        write_secret(
            configuration, _server_properties(home, port, controller_port, password, self._extra_properties)
        )
        (home / "log4j2.properties").write_text(_LOG4J)
        self._say("Starting Kafka …")
        if not (home / "log" / "meta.properties").exists():
            self._format_storage(class_path, configuration)
        command = [str(bundled_java()), "-Xms64m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        command += [f"-Dlog4j2.configurationFile={(home / 'log4j2.properties').as_uri()}"]
        command += ["-cp", class_path, "kafka.Kafka", str(configuration)]
        record = process.launch_server(KAFKA, command, log=self.log_path, environment={}, port=port)
        record.save(self.record_path)
        process.wait_until(
            lambda: process.is_listening(port),
            record,
            log=self.log_path,
            timeout_s=self._settings.startup_timeout_s,
        )
        self._say(f"kafka answers on port {port} (pid {record.pid}).")
        return f"{LOOPBACK}:{port}"

    def _class_path(self) -> str:
        folder = make_state_folder(self._root) / "jars" / KAFKA
        ivy = self._settings.ivy_settings
        jars = resolve_class_path(BROKER, folder, ivy_settings=ivy, notify=self._say)
        logging = resolve_jars([BROKER_LOGGING], folder, ivy_settings=ivy, notify=self._say)
        return ":".join(map(str, [*jars, *logging.values()]))

    def _format_storage(self, class_path: str, configuration: Path) -> None:
        """Give the empty log a cluster's id, as Kafka asks for before its first start."""
        command = [str(bundled_java()), "-XX:TieredStopAtLevel=1", "-cp", class_path]
        command += ["kafka.tools.StorageTool", "format", "-t", new_cluster_id(), "-c", str(configuration)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            raise ServerDidNotStart(
                f"Kafka's storage could not be made: {(done.stdout + done.stderr)[-300:]}"
            )


def new_cluster_id(draw: Callable[[], uuid.UUID] = uuid.uuid4) -> str:
    """A cluster's id as Kafka's own tools draw one: URL-safe base64 that does not begin with a dash.

    They take one that does for an option of theirs: one first start in 64 failed by it.
    """
    while True:
        cluster_id = base64.urlsafe_b64encode(draw().bytes).decode().rstrip("=")
        if not cluster_id.startswith("-"):
            return cluster_id


def configured_cluster(settings: Settings) -> KafkaCluster:
    """The cluster of the settings, or the embedded broker if it runs. Raises ConfigurationError."""
    if settings.kafka_bootstrap is not None:
        return cluster_at_address(settings, settings.kafka_bootstrap)
    embedded = EmbeddedKafka(settings).running_cluster()
    if embedded is None:
        raise ConfigurationError(
            "No Kafka cluster is known, and the embedded broker does not run.",
            hint="Set BRANCHLAKE_KAFKA_BOOTSTRAP=host:port, or start one: branchlake up --with kafka.",
        )
    return embedded


def cluster_at_address(settings: Settings, bootstrap: str) -> KafkaCluster:
    """The cluster at `bootstrap` (`host:port,…`), with the credentials of the settings.

    The embedded broker gets its own login if the settings name no security, so that whoever has its address
    need not know its password. Raises ConfigurationError.
    """
    if settings.kafka_security == "PLAINTEXT":
        embedded = EmbeddedKafka(settings).running_cluster()
        if embedded is not None and bootstrap.replace("localhost", LOOPBACK) == embedded.bootstrap:
            return embedded
    return KafkaCluster.from_settings(settings, bootstrap)


def _server_properties(
    home: Path, port: int, controller_port: int, password: str, extra_properties: Mapping[str, str]
) -> str:
    values = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{LOOPBACK}:{controller_port}",
        "controller.listener.names": CONTROLLER_LISTENER,
        "listeners": f"{CLIENT_LISTENER}://{LOOPBACK}:{port},{CONTROLLER_LISTENER}://{LOOPBACK}:{controller_port}",
        "advertised.listeners": f"{CLIENT_LISTENER}://{LOOPBACK}:{port}",
        **login_properties(password),
        "log.dirs": str(home / "log"),
        "num.partitions": "2",
        # One node has no second copy.
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "1",
        "group.initial.rebalance.delay.ms": "0",
    }
    for name, value in extra_properties.items():
        values[name] = f"{values[name]},{value}" if name in _APPENDED_PROPERTIES else value
    # A backslash begins an escape in such a file.
    return "".join(f"{name}={value}\n".replace("\\", "\\\\") for name, value in values.items())
