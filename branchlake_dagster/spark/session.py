"""Spark sessions that read and write one Nessie reference.

The session's configuration holds the reference (`spark.sql.catalog.nessie.ref`), so user code never names a
branch. Two runs in one process stay separate: each has its own session, never `getOrCreate()`.

`warm_up` makes a first write on the embedded server, which compiles its query code on first use: the first
write takes ten seconds longer than the second. `end_idle_daemons` ends Python processes that Spark leaves
behind. Spark 4.1 starts a daemon for each Connect session whose frames run Python, and keeps it as long as
the server lives: seventy after an hour of tests. Spark starts a new one when it needs it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import psutil

from branchlake_dagster.embedded.jars import NESSIE_SERVER
from branchlake_dagster.embedded.process import IDLE_S, LOOPBACK, ProcessRecord, is_idle
from branchlake_dagster.embedded.servers import (
    EmbeddedServers,
    Endpoints,
    avro_options,
    catalog_conf,
    s3_environment,
)
from branchlake_dagster.errors import BranchlakeError, ConfigurationError, OutcomeUnknown
from branchlake_dagster.internals.pyspark import (
    bind_checkpoints,
    disable_session_finalizer,
    limit_retry_time,
    set_session_settings,
    silence_connect_log,
    translate_errors,
)
from branchlake_dagster.nessie.errors import NessieUnauthorized
from branchlake_dagster.nessie.transport import TOKEN_HINT
from branchlake_dagster.settings import Settings, require_tls

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkGone(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """The Spark server no longer answers. It may or may not have executed the last request."""


def quote_spark_name(name: str) -> str:
    """Return one identifier in backticks; it may contain dots, spaces and backticks."""
    return f"`{name.replace('`', '``')}`"


def quote_spark_path(parts: Iterable[str]) -> str:
    """Return a name of several parts, such as catalog, namespaces and table, with each part in backticks."""
    return ".".join(map(quote_spark_name, parts))


def quote_spark_string(value: str) -> str:
    """Return a SQL string literal in single quotes. Backslashes and single quotes are escaped."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_CHECK_INTERVAL_S = 60.0
_check_lock = threading.Lock()
_last_checks: dict[int, float] = {}


def end_idle_daemons(server: ProcessRecord, *, now: Callable[[], float] = time.time) -> int:
    """End Spark's Python daemons that have no worker and are older than `IDLE_S`. Return how many.

    Ends only children of the server, and checks each server at most once a minute per process. Daemons that
    were forked from the warm process are ended by that process.
    """
    with _check_lock:
        if now() - _last_checks.get(server.pid, 0.0) < _CHECK_INTERVAL_S or not server.is_alive():
            return 0
        _last_checks[server.pid] = now()
    ended_count = 0
    with contextlib.suppress(psutil.Error):  # the server or a daemon ended meanwhile
        for process in psutil.Process(server.pid).children():
            with contextlib.suppress(psutil.Error):
                is_old = now() - process.create_time() > IDLE_S
                if is_old and "pyspark.daemon" in process.cmdline() and is_idle(process):
                    process.terminate()
                    ended_count += 1
    return ended_count


_SERVER_SIDE_KEYS = ("spark.sql.extensions",)
_CATALOG = "spark.sql.catalog."
_NESSIE_AUTHENTICATION = f"{_CATALOG}nessie.authentication"
_NESSIE_TOKEN = f"{_NESSIE_AUTHENTICATION}.token"
_WORKER_ERRORS = (
    "org.apache.spark.api.python.PythonException",
    "An exception was thrown from the Python worker",
)
"""Texts of Spark's errors for Python code on its workers."""
_REFUSALS = ("NessieNotAuthorizedException", "NessieForbiddenException")
_EMBEDDED_TIMEOUT_S = 60.0
"""Seconds to wait for an embedded server that does not answer. It may only be short of processor time."""
_SECRET_KEY = re.compile(r"(?i)secret|password|token|access[.]?key")
"""Names of settings that hold secrets, as Spark recognizes them by default (`spark.redaction.regex`)."""
_classic_lock = threading.Lock()


def open_session(
    settings: Settings, endpoints: Endpoints, *, ref: str, conf: Mapping[str, str]
) -> SparkSession:
    """Open a new session at `ref`, a branch, a tag or `name@hash`.

    `conf` has settings (such as dagster-pyspark's) that replace branchlake's defaults. A Connect session
    takes 15 ms with a running server. The first classic session in a process starts a JVM (11-18 s); later
    ones share the JVM but not its settings. Raises SecretWithoutTls before it connects.
    """
    session_conf = {
        **catalog_conf(settings, endpoints.nessie_uri, ref=ref),
        **_authentication_conf(endpoints),
        **conf,
    }
    if settings.session_kind == "classic":
        return _open_classic(settings, session_conf)
    return _open_connect(settings, endpoints, session_conf)


def connect_url(remote: str, token: str | None) -> str:
    """Return the Spark Connect URL `remote` with the token among its parameters.

    Returns `remote` as it is without a token, or if the URL already has one.
    """
    if not token or "token=" in remote:
        return remote
    separator = ";" if ";" in remote else "/;"
    return f"{remote.rstrip('/')}{separator}token={token}"


def is_connect(session: SparkSession) -> bool:
    """Return whether this is a Spark Connect session."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def find_application(session: SparkSession) -> str | None:
    """Return the id of the Spark application in which a session runs; None if Spark does not report it.

    All Connect sessions of a server run in one application. Costs one request to Spark.
    """
    return session.conf.get("spark.app.id", None)


@contextmanager
def translate_refusals() -> Iterator[None]:
    """Turn "not authorized" and "forbidden" errors of Spark's Nessie client into NessieUnauthorized.

    The original text is dropped: it contains the server's answer, and a server may echo the token.
    """
    try:
        yield
    except Exception as error:
        if refusal := _find_refusal(str(error)):
            raise refusal from None
        raise


def _find_refusal(message: str) -> NessieUnauthorized | None:
    """Return the error for a text of Spark that names a refusal by Nessie; None for other texts.

    Python code on Spark's workers has no Nessie client. The text of its errors may contain data, and so the
    name of any exception.
    """
    if any(marker in message for marker in _WORKER_ERRORS):
        return None
    exception_name = next((name for name in _REFUSALS if name in message), None)
    return (
        NessieUnauthorized(f"Nessie refused a request of Spark ({exception_name}).", hint=TOKEN_HINT)
        if exception_name
        else None
    )


def _translate_failures(session: SparkSession, server: str) -> None:
    """Let a Connect session raise NessieUnauthorized and SparkGone, also in user code.

    They replace the errors of Spark that have these causes.
    """
    import grpc

    def translate_error(error: Exception) -> Exception | None:
        # The trailer of the call contains the server's exception class. A lost server sends no trailer.
        get_trailer = getattr(error, "trailing_metadata", None)
        metadata = get_trailer() if get_trailer else None
        if not metadata and isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAVAILABLE:
            return SparkGone(
                f"The Spark server at {server} no longer answers.",
                hint="Read the server's log. The next run that needs the embedded server starts it again."
                " Re-execute the run if it did not retry.",
                subject=server,
            )
        return _find_refusal(str(metadata or ""))

    translate_errors(cast("Any", session).client, translate_error)


def _open_connect(settings: Settings, endpoints: Endpoints, conf: dict[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    custom_remote = conf.pop("spark.remote", None)
    remote = custom_remote or endpoints.spark_remote
    if remote is None:
        raise ConfigurationError(
            "The address of the Spark Connect server is not set.", hint="Set BRANCHLAKE_SPARK_REMOTE."
        )
    silence_connect_log()
    disable_session_finalizer()
    url = connect_url(remote, endpoints.spark_token)
    require_tls(url, _secret_names(conf))
    session: SparkSession = SparkSession.builder.remote(url).create()
    if settings.embedded_spark and not custom_remote:
        # A killed embedded server restarts at another port, so waiting at the old port is useless. A live
        # run once waited there for minutes.
        limit_retry_time(cast("Any", session).client, _EMBEDDED_TIMEOUT_S)
    _translate_failures(session, urlsplit(url).netloc)
    bind_checkpoints(session)
    set_session_settings(session, {key: value for key, value in conf.items() if key not in _SERVER_SIDE_KEYS})
    return session


def _secret_names(conf: Mapping[str, str]) -> list[str]:
    """Return a description of each secret in a session's settings: Nessie's token, and secrets of a user.

    `conf` has the values by setting name. A setting is a secret if its name looks like one, whatever its
    value is. The descriptions do not contain the values.
    """
    known_names = {_NESSIE_TOKEN: "Nessie's token (BRANCHLAKE_NESSIE_TOKEN, or run/nessie.token)"}
    return [known_names.get(key, f"the session's setting {key}") for key in conf if _SECRET_KEY.search(key)]


def _open_classic(settings: Settings, conf: dict[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    with _classic_lock:
        # pyspark refuses a classic session while these variables point to a Connect server.
        for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"):
            os.environ.pop(name, None)
        os.environ.update(s3_environment(settings))
        if settings.spark_master.startswith("local"):
            # The workers run on this machine. pyspark would start any `python3`, without our libraries.
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        jars = EmbeddedServers(settings).fetch_jars()
        jar_paths = ",".join(str(path) for jar, path in jars.items() if jar is not NESSIE_SERVER)
        process_conf = {
            "spark.jars": jar_paths,
            "spark.ui.enabled": "false",
            "spark.driver.memory": settings.spark_driver_memory,
            "spark.sql.warehouse.dir": str(settings.state_dir / "spark" / "warehouse"),
        }
        if settings.spark_master.startswith("local"):
            process_conf |= {
                "spark.driver.bindAddress": LOOPBACK,
                "spark.driver.host": LOOPBACK,
                "spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2)),
            }
        if "SPARK_CONF_DIR" not in os.environ:
            # A user's own configuration directory may set these options, and ours would replace them.
            for name in ("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions"):
                process_conf[name] = " ".join(avro_options())
        # Leave out the catalog's settings: in the process they would apply to all sessions, branch included.
        process_conf |= {key: value for key, value in conf.items() if not key.startswith(_CATALOG)}
        builder = SparkSession.builder.master(settings.spark_master).appName("branchlake")
        session = builder.config(map=dict(process_conf)).getOrCreate().newSession()
    for key, value in conf.items():
        # Spark does not know a catalog's settings and reports them as not modifiable. Setting them works.
        if key.startswith(_CATALOG) or session.conf.isModifiable(key):
            session.conf.set(key, value)
    return session


def _authentication_conf(endpoints: Endpoints) -> dict[str, str]:
    """Return the settings with the bearer token for Spark's Nessie client; {} without a token.

    They are set per session, so that no command line shows the token.
    """
    if endpoints.nessie_token is None:
        return {}
    return {f"{_NESSIE_AUTHENTICATION}.type": "BEARER", _NESSIE_TOKEN: endpoints.nessie_token}


_WARM_UP_CATALOG = "warming"
_WARM_UP_TABLE = f"{_WARM_UP_CATALOG}.up.t"
_WARM_UP_ROWS = "SELECT id AS key, id % 7 AS n, CAST(id AS STRING) AS word FROM range(100)"


def warm_up(settings: Settings, endpoints: Endpoints) -> None:
    """Create a table, merge into it, read it and delete it, so that the first write of a run is fast.

    The table is in a separate catalog of this session, in the server's scratch folder: not in the lake, and
    without Nessie. Does nothing if the Spark server is not embedded.
    """
    if not settings.embedded_spark:
        return
    folder = settings.state_dir / "spark" / "warming"
    conf = {
        f"spark.sql.catalog.{_WARM_UP_CATALOG}": "org.apache.iceberg.spark.SparkCatalog",
        f"spark.sql.catalog.{_WARM_UP_CATALOG}.type": "hadoop",
        f"spark.sql.catalog.{_WARM_UP_CATALOG}.warehouse": folder.as_uri(),
        f"spark.sql.catalog.{_WARM_UP_CATALOG}.cache-enabled": "false",
    }
    session = open_session(settings, endpoints, ref="main", conf=conf)
    try:
        session.sql(f"CREATE TABLE {_WARM_UP_TABLE} USING iceberg PARTITIONED BY (n) AS {_WARM_UP_ROWS}")
        session.sql(
            f"MERGE INTO {_WARM_UP_TABLE} t USING ({_WARM_UP_ROWS}) s ON t.key = s.key"
            " WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        )
        measures = ("count(*)", "sum(CAST(n > 3 AS BIGINT))", "count(DISTINCT key)", "max(word)")
        session.table(_WARM_UP_TABLE).selectExpr(*measures).collect()
    finally:
        session.stop()
        shutil.rmtree(Path(folder), ignore_errors=True)
