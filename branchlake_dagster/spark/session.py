"""Spark sessions that read and write one Nessie reference.

The session carries the reference (`spark.sql.catalog.nessie.ref`), so user code never names a branch. Two
runs in one process stay apart: each has a session of its own, never `getOrCreate()`.

`warm_up` makes a first write on the embedded server, which compiles its query code at the first use: the
first write takes ten seconds longer than the second. `end_idle_daemons` ends Python processes that Spark
leaves behind: Spark 4.1 starts a daemon for each Connect session whose frames run Python, and keeps it for as
long as the server lives, seventy of them after an hour of tests. Spark starts another one when it needs it.
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

from branchlake_dagster.embedded.idle_daemons import IDLE_S, is_idle
from branchlake_dagster.embedded.jars import NESSIE_SERVER
from branchlake_dagster.embedded.process import LOOPBACK, ProcessRecord
from branchlake_dagster.embedded.servers import (
    EmbeddedServers,
    Endpoints,
    avro_options,
    catalog_conf,
    s3_environment,
)
from branchlake_dagster.errors import BranchlakeError, ConfigurationError, OutcomeUnknown
from branchlake_dagster.internals.pyspark import (
    give_up_within,
    handle_errors_by,
    keep_connect_log_off,
    leave_sessions_to_stop,
)
from branchlake_dagster.nessie.errors import NessieUnauthorized
from branchlake_dagster.nessie.failures import REFUSED_HINT
from branchlake_dagster.settings import Settings, require_tls

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkGone(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """Spark's server does not answer any more. What it was asked for last it may have done."""


def quoted(name: str) -> str:
    """One identifier, whatever it holds: dots, spaces and backticks included."""
    return f"`{name.replace('`', '``')}`"


def dotted(parts: Iterable[str]) -> str:
    """A name of several parts, such as catalogue, namespaces and table."""
    return ".".join(map(quoted, parts))


def text_literal(text: str) -> str:
    """A string literal. Backslashes are escapes in Spark's, so they are doubled."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_EVERY_S = 60.0
_looked = threading.Lock()
_last: dict[int, float] = {}


def end_idle_daemons(server: ProcessRecord, *, now: Callable[[], float] = time.time) -> int:
    """End the ordinary daemons of a Spark server on this machine that have no worker, and are minutes old.

    How many. Looks once a minute and process, whoever asks; touches only children of the server. Those that
    were forked from the warm process are ended by it.
    """
    with _looked:
        if now() - _last.get(server.pid, 0.0) < _EVERY_S or not server.alive():
            return 0
        _last[server.pid] = now()
    ended = 0
    with contextlib.suppress(psutil.Error):  # it ended meanwhile
        for one in psutil.Process(server.pid).children():
            with contextlib.suppress(psutil.Error):
                old = now() - one.create_time() > IDLE_S
                if old and "pyspark.daemon" in one.cmdline() and is_idle(one):
                    one.terminate()
                    ended += 1
    return ended


_SERVER_SIDE = ("spark.sql.extensions",)
_CATALOG = "spark.sql.catalog."
_NESSIE_AUTHENTICATION = f"{_CATALOG}nessie.authentication"
_NESSIE_TOKEN = f"{_NESSIE_AUTHENTICATION}.token"
_REFUSALS = ("NessieNotAuthorizedException", "NessieForbiddenException")
_PATIENCE_S = 60.0
"""With an embedded server that does not answer: one that has no processor for a while does."""
_SECRET_KEY = re.compile(r"(?i)secret|password|token|access[.]?key")
"""Names of settings that hold secrets, as Spark recognizes them by default (`spark.redaction.regex`)."""
_classic_start = threading.Lock()


def open_session(
    settings: Settings, endpoints: Endpoints, *, ref: str, conf: Mapping[str, str]
) -> SparkSession:
    """A new session at `ref`; `conf` (for instance from dagster-pyspark) wins over our defaults.

    Connect: 15 ms against a running server. Classic: the first one in a process starts a JVM (11-18 s),
    later ones share it but not its settings. Raises SecretWithoutTls before it connects.
    """
    settled = {**catalog_conf(settings, endpoints.nessie_uri, ref=ref), **_authentication(endpoints), **conf}
    if settings.session_kind == "classic":
        return _open_classic(settings, settled)
    return _open_connect(settings, endpoints, settled)


def connect_url(remote: str, token: str | None) -> str:
    """A Spark Connect URL with the token among its parameters, unless it names one itself."""
    if not token or "token=" in remote:
        return remote
    separator = ";" if ";" in remote else "/;"
    return f"{remote.rstrip('/')}{separator}token={token}"


def is_connect(session: SparkSession) -> bool:
    """Whether this is a Spark Connect session."""
    return type(session).__module__.startswith("pyspark.sql.connect")


@contextmanager
def telling_refusals() -> Iterator[None]:
    """Turn what Spark's own Nessie client calls not authorised or forbidden into NessieUnauthorized.

    Without the text: the JVM passes on what the server says, and a server may echo the token.
    """
    try:
        yield
    except Exception as error:
        if refusal := _refusal_in(str(error)):
            raise refusal from None
        raise


def _refusal_in(text: str) -> NessieUnauthorized | None:
    kind = next((name for name in _REFUSALS if name in text), None)
    return (
        NessieUnauthorized(f"Nessie refused what Spark asked of it ({kind}).", hint=REFUSED_HINT)
        if kind
        else None
    )


def _tell_failures(session: SparkSession, server: str) -> None:
    """Let a Connect session raise NessieUnauthorized and SparkGone in users' code too."""
    import grpc

    def told(error: Exception) -> Exception | None:
        # The server's exception class stands in a trailer of the call; one that is gone has none.
        trailer = getattr(error, "trailing_metadata", None)
        found = trailer() if trailer else None
        if not found and isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAVAILABLE:
            return SparkGone(
                f"Spark at {server} does not answer any more.",
                hint="See its log. The embedded one is started again by whatever needs it next; a run goes on"
                " by its retry.",
                subject=server,
            )
        return _refusal_in(str(found or ""))

    handle_errors_by(cast("Any", session).client, told)


def _open_connect(settings: Settings, endpoints: Endpoints, conf: dict[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    named = conf.pop("spark.remote", None)
    remote = named or endpoints.spark_remote
    if remote is None:
        raise ConfigurationError("No Spark Connect server is known.", hint="Set BRANCHLAKE_SPARK_REMOTE.")
    keep_connect_log_off()
    leave_sessions_to_stop()
    url = connect_url(remote, endpoints.spark_token)
    require_tls(url, _secrets_in(conf))
    session: SparkSession = SparkSession.builder.remote(url).create()
    if settings.embedded_spark and not named:
        # One that was killed comes back at another port: nothing is waited for at the old one. A live run
        # once stood still for minutes after that.
        give_up_within(cast("Any", session).client, _PATIENCE_S)
    _tell_failures(session, urlsplit(url).netloc)
    for key, value in conf.items():
        if key not in _SERVER_SIDE:
            session.conf.set(key, value)
    return session


def _secrets_in(conf: Mapping[str, str]) -> list[str]:
    """Descriptions of the secrets among a session's settings: Nessie's token, and what a user has set."""
    names = {_NESSIE_TOKEN: "Nessie's token (BRANCHLAKE_NESSIE_TOKEN, or run/nessie.token)"}
    return [names.get(key, f"the session's setting {key}") for key in conf if _SECRET_KEY.search(key)]


def _open_classic(settings: Settings, conf: dict[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    with _classic_start:
        # pyspark refuses a classic session while these point to a Connect server.
        for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"):
            os.environ.pop(name, None)
        os.environ.update(s3_environment(settings))
        if settings.spark_master.startswith("local"):
            # Its workers are here too; pyspark would take whatever `python3` is, without our libraries.
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        jars = EmbeddedServers(settings).fetch_jars()
        paths = ",".join(str(path) for jar, path in jars.items() if jar is not NESSIE_SERVER)
        of_process = {
            "spark.jars": paths,
            "spark.ui.enabled": "false",
            "spark.driver.memory": settings.spark_driver_memory,
            "spark.sql.warehouse.dir": str(settings.state_dir / "spark" / "warehouse"),
        }
        if settings.spark_master.startswith("local"):
            of_process |= {
                "spark.driver.bindAddress": LOOPBACK,
                "spark.driver.host": LOOPBACK,
                "spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2)),
            }
        if "SPARK_CONF_DIR" not in os.environ:
            # A configuration of the user's own may set these, and ours would replace them.
            for name in ("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions"):
                of_process[name] = " ".join(avro_options())
        # Not the catalogue's: as settings of the process they would be every session's, the branch included.
        of_process |= {key: value for key, value in conf.items() if not key.startswith(_CATALOG)}
        builder = SparkSession.builder.master(settings.spark_master).appName("branchlake")
        session = builder.config(map=dict(of_process)).getOrCreate().newSession()
    for key, value in conf.items():
        # Spark does not know a catalogue's settings and so calls them not modifiable; setting them works.
        if key.startswith(_CATALOG) or session.conf.isModifiable(key):
            session.conf.set(key, value)
    return session


def _authentication(endpoints: Endpoints) -> dict[str, str]:
    """The bearer token for Spark's own Nessie client, set per session so that no command line shows it."""
    if endpoints.nessie_token is None:
        return {}
    return {f"{_NESSIE_AUTHENTICATION}.type": "BEARER", _NESSIE_TOKEN: endpoints.nessie_token}


_WARM_UP_CATALOG = "warming"
_TABLE = f"{_WARM_UP_CATALOG}.up.t"
_ROWS = "SELECT id AS key, id % 7 AS n, CAST(id AS STRING) AS word FROM range(100)"


def warm_up(settings: Settings, endpoints: Endpoints) -> None:
    """Create, merge into, count and replace a table; nothing of it is left.

    In a catalogue of the session's own, whose folder is in the server's scratch space: not in the lake, and
    without Nessie. Does nothing when the Spark server is not ours.
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
        session.sql(f"CREATE TABLE {_TABLE} USING iceberg PARTITIONED BY (n) AS {_ROWS}")
        session.sql(
            f"MERGE INTO {_TABLE} t USING ({_ROWS}) s ON t.key = s.key"
            " WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        )
        measures = ("count(*)", "sum(CAST(n > 3 AS BIGINT))", "count(DISTINCT key)", "max(word)")
        session.table(_TABLE).selectExpr(*measures).collect()
    finally:
        session.stop()
        shutil.rmtree(Path(folder), ignore_errors=True)
