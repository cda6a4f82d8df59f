"""The embedded Kafka broker for trials and tests: Apache Kafka in KRaft mode, one node on loopback.

Its files are in the state folder of the embedded servers: `kafka/` has the topics, `run/kafka.json` the
process, `run/kafka.password` the password, and `logs/kafka.log` the log. Only `branchlake up --with kafka`
starts it.

The broker has one user, whose password only the owner of the state folder can read: other accounts of the
machine reach the loopback address too. Both listeners require SASL PLAIN, also that of the controller,
because it accepts commands as well.
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
from branchlake_dagster.embedded.process import (
    LOOPBACK,
    ProcessRecord,
    ServerDidNotStart,
    choose_port,
    keep_port,
    rotate_by_copy,
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

    `run/kafka.password` has the password, and `run/kafka.properties` the client options for Kafka's console
    tools.
    """

    def __init__(self, root: Path) -> None:
        self._password_path = root / "run" / "kafka.password"
        self.client_properties = root / "run" / "kafka.properties"

    @property
    def exists(self) -> bool:
        """Whether a password is stored."""
        return self._stored_password() is not None

    def create_password(self) -> str:
        """Create and store a password if none is stored, and return it.

        Also writes the client options for Kafka's console tools.
        """
        password = self._stored_password() or secrets.token_urlsafe(24)
        write_secret(self._password_path, password)
        login = f'{_LOGIN_MODULE} required username="{BROKER_USER}" password="{password}";'
        write_secret(
            self.client_properties,
            f"security.protocol={_SECURITY_PROTOCOL}\nsasl.mechanism={_SASL_MECHANISM}\n"
            f"sasl.jaas.config={login}\n",
        )
        return password

    def cluster(self, address: str) -> KafkaCluster:
        """Return the connection to the broker at `address`, with its login.

        Without a stored password the connection has no login: an older release started the broker.
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
    """Return the broker's properties that make both listeners require the login.

    The properties contain the password: write them only into a file that nobody else can read.
    """
    login = (
        f'{_LOGIN_MODULE} required username="{BROKER_USER}" password="{password}"'
        f' user_{BROKER_USER}="{password}";'
    )
    properties = {
        "listener.security.protocol.map": f"{CLIENT_LISTENER}:{_SECURITY_PROTOCOL},"
        f"{CONTROLLER_LISTENER}:{_SECURITY_PROTOCOL}",
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
"""The broker's jars have no logging backend, so without this one failed starts would leave no message."""
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
    """The broker of one state folder. Several processes may use it at the same time.

    `extra_properties` are further properties of the broker. Further listeners are appended to branchlake's
    own listeners, which require the password. `say` is called with lines about the progress of the start.
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
        """Return the broker's address (`host:port`), or None if it does not run. Rotates a large log."""
        rotate_by_copy(self.log_path)
        record = ProcessRecord.load(self.record_path)
        if record and record.is_alive() and process.is_listening(record.port):
            return f"{LOOPBACK}:{record.port}"
        return None

    def up(self) -> str:
        """Start the broker if needed; return its address. Raises ServerDidNotStart or DownloadFailed."""
        if address := self.running():
            return address
        with self._lock():
            return self.running() or self._start()

    def cluster(self) -> KafkaCluster:
        """Start the broker if needed; return the connection with its login. Raises the errors of `up`."""
        return self._login.cluster(self.up())

    def running_cluster(self) -> KafkaCluster | None:
        """Return the connection to the broker with its login, or None if it does not run."""
        address = self.running()
        return self._login.cluster(address) if address else None

    def down(self) -> bool:
        """Stop the broker and return whether it ran. Its topics stay."""
        if not self.record_path.exists():
            return False
        with self._lock():
            record = ProcessRecord.load(self.record_path)
            stopped = bool(record and process.stop_process(record))
            self.record_path.unlink(missing_ok=True)
        return stopped

    @property
    def requires_password(self) -> bool:
        """Whether clients must log in. A running broker that an older release started requires no login."""
        return self._login.exists

    @property
    def client_properties(self) -> Path:
        """The file with the login for Kafka's console tools. Only its owner can read it."""
        return self._login.client_properties

    @property
    def record(self) -> ProcessRecord | None:
        """The process of the broker, or None if it does not run."""
        return ProcessRecord.load(self.record_path) if self.running() else None

    @property
    def log_path(self) -> Path:
        """The path of the broker's log."""
        return self._root / "logs" / f"{KAFKA}.log"

    @property
    def record_path(self) -> Path:
        """The path of the process record. The file is missing if the broker was never started."""
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
        """Format the empty storage with a new cluster id, as Kafka requires before its first start.

        `class_path` has the jars of Kafka, separated by colons. `configuration` is the file
        `server.properties`. Raises ServerDidNotStart if Kafka's tool fails.
        """
        command = [str(bundled_java()), "-XX:TieredStopAtLevel=1", "-cp", class_path]
        command += ["kafka.tools.StorageTool", "format", "-t", new_cluster_id(), "-c", str(configuration)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            raise ServerDidNotStart(
                f"Kafka could not format its storage: {(done.stdout + done.stderr)[-300:]}"
            )


def new_cluster_id(draw: Callable[[], uuid.UUID] = uuid.uuid4) -> str:
    """Draw a cluster id as Kafka's own tools do: URL-safe base64 that does not begin with a dash.

    The tools read an id with a leading dash as an option, so one first start in 64 would fail.
    """
    while True:
        cluster_id = base64.urlsafe_b64encode(draw().bytes).decode().rstrip("=")
        if not cluster_id.startswith("-"):
            return cluster_id


def configured_cluster(settings: Settings) -> KafkaCluster:
    """Return the Kafka cluster of the settings. If they name none, return the running embedded broker.

    Raises ConfigurationError if there is neither.
    """
    if settings.kafka_bootstrap is not None:
        return cluster_at_address(settings, settings.kafka_bootstrap)
    embedded = EmbeddedKafka(settings).running_cluster()
    if embedded is None:
        raise ConfigurationError(
            "The settings name no Kafka cluster, and the embedded broker does not run.",
            hint="Set BRANCHLAKE_KAFKA_BOOTSTRAP=host:port, or start one: branchlake up --with kafka.",
        )
    return embedded


def cluster_at_address(settings: Settings, bootstrap: str) -> KafkaCluster:
    """Return the cluster at `bootstrap` (`host:port,…`), with the credentials of the settings.

    If the settings name no security and the address is that of the running embedded broker, the login of
    that broker is used, so callers need not know its password. Raises ConfigurationError if the settings
    contradict each other.
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
        "listeners": f"{CLIENT_LISTENER}://{LOOPBACK}:{port},"
        f"{CONTROLLER_LISTENER}://{LOOPBACK}:{controller_port}",
        "advertised.listeners": f"{CLIENT_LISTENER}://{LOOPBACK}:{port}",
        **login_properties(password),
        "log.dirs": str(home / "log"),
        "num.partitions": "2",
        # One node cannot hold a second copy.
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "1",
        "group.initial.rebalance.delay.ms": "0",
    }
    for name, value in extra_properties.items():
        values[name] = f"{values[name]},{value}" if name in _APPENDED_PROPERTIES else value
    # In a properties file a backslash begins an escape.
    return "".join(f"{name}={value}\n".replace("\\", "\\\\") for name, value in values.items())
