"""What `branchlake doctor` looks at in a Spark Connect server: address, version, catalogue, executors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Protocol

import grpc
import pyspark

from branchlake_dagster.cli.doctor.examination import Examination
from branchlake_dagster.embedded.jars import ICEBERG_SPARK
from branchlake_dagster.embedded.servers import AVRO_LIMITS, Endpoints
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.settings import Settings
from branchlake_dagster.spark.session import connect_url, open_session
from branchlake_dagster.wording import counted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
