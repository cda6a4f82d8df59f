"""The lake as one object: settings, Nessie client, tables at a reference, and Spark sessions.

Also its names and addresses: how SQL writes a table's name, and where Nessie serves its web page and its
Iceberg REST catalog.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from pyarrow import ArrowException
from pyiceberg.typedef import Identifier

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.embedded.rest_catalog import serves_rest
from branchlake_dagster.embedded.servers import SPARK, EmbeddedServers, Endpoints
from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.nessie.client import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, NessieClient
from branchlake_dagster.nessie.errors import Breaker, RetryBudget, RetryPolicy
from branchlake_dagster.nessie.transport import GuardedTransport, HttpTransport
from branchlake_dagster.settings import Settings
from branchlake_dagster.spark.session import end_idle_daemons, open_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def quote_sql_name(name: str) -> str:
    """Return a name in double quotes. Double quotes inside the name are doubled."""
    return '"' + name.replace('"', '""') + '"'


def sql_name(key: Sequence[str]) -> str:
    """Return a table's name for a SQL query: its parts with dots between them, quoted where needed.

    A query has at most three parts. So the inner levels of a deeper namespace become one part: the key
    `("a", "b", "c", "t")` becomes `a."b.c".t`.
    """
    parts = [key[0], ".".join(key[1:-1]), key[-1]] if len(key) > 3 else list(key)
    return ".".join(
        part if re.fullmatch(r"[a-z_][a-z0-9_]*", part) else quote_sql_name(part) for part in parts
    )


_log = logging.getLogger(__name__)

MAIN = "main"
"""The branch that readers of the lake see."""


_clients: WeakValueDictionary[tuple[int, str, str | None, bool | str], NessieClient] = WeakValueDictionary()
"""Clients in use, by process id and connection settings. Two sides of a fork must not share a connection."""
_clients_lock = threading.RLock()
"""Reentrant: a finalizer that runs while its thread holds the lock may call Nessie."""


def _get_shared_client(uri: str, token: str | None, verify: bool | str) -> NessieClient:
    """Return the client that all resources of this process share, with its open connections.

    Dagster makes several copies of a resource, which should not open connections of their own.
    """
    key = (os.getpid(), uri, token, verify)
    with _clients_lock:
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = _create_client(uri, token, verify)
        return client


def _create_client(uri: str, token: str | None, verify: bool | str) -> NessieClient:
    """Create a client whose requests share a retry budget and a circuit breaker.

    `uri` is the address of Nessie's API, `token` its bearer token, None without authentication. `verify` says
    whether TLS certificates are verified, or is the path of a CA bundle.
    """
    transport = HttpTransport(
        uri, token=token, verify=verify, connect_timeout_s=CONNECT_TIMEOUT_S, read_timeout_s=READ_TIMEOUT_S
    )
    return NessieClient(
        uri, transport=GuardedTransport(transport, Breaker()), retry=RetryPolicy(budget=RetryBudget())
    )


class Lakehouse:
    """Connections of one process to the lake. Embedded servers are started when first needed.

    For scripts and notebooks. An asset uses a `LakehouseResource`, which knows its run's branch.

    Args:
        settings (Optional[Settings]): Where the lake is. (default: the environment's `BRANCHLAKE_…`)
        say (Callable[[str], None]): Called with one line of text for each slow action, such as starting a
            server or downloading jars. (default: silent)
        start (bool): Start embedded servers that do not run. Pass False to only read. (default: True)

    Raises:
        LakeNotRunning: From its methods: the lake does not run, and `start` is False.
        BranchlakeError: From its methods, for instance `ServerDidNotStart` and `NessieUnauthorized`. The hint
            says what to do.

    Examples:
        .. code-block:: python

            from branchlake_dagster import Lakehouse

            lake = Lakehouse()
            prices = lake.catalog("main").load_table(("shop", "prices")).scan().to_polars()
            spark = lake.spark_session("main")
            spark.sql("SELECT count(*) FROM nessie.shop.prices").show()
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        say: Callable[[str], None] = lambda _: None,
        start: bool = True,
    ) -> None:
        self.settings = settings or Settings()
        self._start = start
        self.servers = EmbeddedServers(self.settings, notify=say)
        # Reentrant: a finalizer that runs while this thread holds the lock may call Nessie.
        self._lock = threading.RLock()
        self._client: NessieClient | None = None
        self._token: str | None = None

    def endpoints(self, *, spark: bool = True) -> Endpoints:
        """Return the servers' addresses. Starts embedded servers that do not run, unless `start` is False.

        With `spark=False` neither needs nor starts Spark.
        """
        return self.servers.endpoints(spark=spark, start=self._start)

    @property
    def nessie(self) -> NessieClient:
        """The client for references, contents, commits and merges. Starts Nessie if needed, but not Spark.

        A restarted embedded Nessie may have another address. Then this returns another client.
        """
        with self._lock:
            endpoints = self.endpoints(spark=False)
            if self._client is None or (self._client.uri, self._token) != (
                endpoints.nessie_uri,
                endpoints.nessie_token,
            ):
                self._token = endpoints.nessie_token
                self._client = _get_shared_client(
                    endpoints.nessie_uri, self._token, self.settings.nessie_verify_tls
                )
            return self._client

    def catalog(
        self,
        ref: str = MAIN,
        *,
        properties: Mapping[str, str] | None = None,
        on_load: Callable[[Identifier], None] | None = None,
    ) -> NessieCatalog:
        """Return a PyIceberg catalog at `ref`: a branch, a tag, or `name@hash` (then read-only).

        `properties` are further properties of the catalog. `on_load` is called with the identifier of each
        table that the catalog loads.
        """
        return NessieCatalog.from_client(
            self.nessie,
            ref,
            self.settings.warehouse_uri,
            on_load=on_load,
            **self.settings.file_io_properties(),
            **(properties or {}),
        )

    def spark_session(self, ref: str = MAIN, *, conf: Mapping[str, str] | None = None) -> SparkSession:
        """Open a new Spark session whose catalog `nessie` reads and writes at `ref`.

        `conf` has settings of the session, which replace the defaults. The session may write without this
        package's catalog, so the repository is recorded first (see `NessieCatalog.record_repository`).
        """
        endpoints = self.endpoints()  # starts Nessie and Spark at the same time
        try:
            self.catalog().record_repository()
        except (BranchlakeError, OSError, ValueError, ArrowException) as error:
            # A session may only read, with rights that allow no more. The next process tries again.
            _log.warning("The Nessie repository was not recorded in the warehouse: %s", error)
        if self.settings.embedded_spark and (server := self.servers.status()[SPARK]):
            end_idle_daemons(server)
        return open_session(self.settings, endpoints, ref=ref, conf=conf or {})


def nessie_page_url(endpoints: Endpoints, settings: Settings) -> str:
    """Return the address of Nessie's web page, or a sentence if the embedded server requires a token.

    The page cannot send a token, so such a server does not serve it.
    """
    if settings.embedded_nessie and endpoints.nessie_token is not None:
        return "off, as Nessie requires a token: set BRANCHLAKE_GUARD_NESSIE=false, then down and up"
    return f"{_server_url(endpoints)}/"


def commit_page_url(endpoints: Endpoints, settings: Settings, commit: str) -> str | None:
    """Return the URL of Nessie's web page about a commit on `main`. `commit` is its hash.

    None if the embedded Nessie server requires a token, which a browser does not send.
    """
    if settings.embedded_nessie and endpoints.nessie_token is not None:
        return None
    return f"{_server_url(endpoints)}/commits/{MAIN}/{commit}"


def rest_catalog_url(endpoints: Endpoints, settings: Settings) -> str | None:
    """Return the address of the embedded Nessie's Iceberg REST catalog.

    Returns None if Nessie is not embedded. Returns the reason, as part of a sentence, if it cannot
    serve a REST catalog of this warehouse.
    """
    if not settings.embedded_nessie:
        return None
    if not serves_rest(settings):
        return "none: Nessie serves s3:// warehouses only"
    return f"{_server_url(endpoints)}/iceberg"


def _server_url(endpoints: Endpoints) -> str:
    return endpoints.nessie_uri.rstrip("/").rpartition("/api/")[0]
