"""The server of throw-away lakes, and the environment variables that keep tests away from real lakes."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import SecretStr

from branchlake_dagster.embedded.process import ProcessRecord, find_start_s
from branchlake_dagster.embedded.servers import EmbeddedServers
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import Delete, ReferenceType
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.settings import Settings
from branchlake_dagster.testing.lake import ThrowawayLake

_VARIABLE_PREFIX = "BRANCHLAKE_"
_MACHINE_SETTINGS = frozenset({"guard_nessie", "ivy_settings", "spark_driver_memory", "startup_timeout_s"})
"""Settings that depend on the machine, so tests keep their values from the environment."""
_RESERVED_SETTINGS = frozenset(
    {
        *("state_dir", "warehouse", "nessie_uri", "nessie_token", "nessie_verify_tls", "nessie_port"),
        *("s3_endpoint", "s3_region", "s3_access_key_id", "s3_secret_access_key"),
    }
)
"""Settings that a throw-away lake sets itself, because they identify a lake."""


@contextmanager
def settings_in_environment(state_dir: str, fields: Mapping[str, Any]) -> Iterator[Settings]:
    """Set the environment variables of this process so that all code in it uses the same settings.

    Removes the other `BRANCHLAKE_…` variables of settings, except those that depend on the machine. All
    variables are restored at the end. Yields the settings.

    Args:
        state_dir: The state folder of the lake.
        fields: Further fields of `Settings`, by name.

    Raises:
        ConfigurationError: A field would identify another lake.
    """
    if reserved_names := sorted(_RESERVED_SETTINGS & fields.keys()):
        raise ConfigurationError(
            f"A throw-away lake is a new lake, so it does not accept {', '.join(reserved_names)}.",
            hint="Pass only settings of behavior, such as require_checks or default_namespace.",
            reason="names_another_lake",
            subject=", ".join(reserved_names),
        )
    field_by_variable = {f"{_VARIABLE_PREFIX}{name}".upper(): name for name in Settings.model_fields}
    saved_variables = {name: os.environ[name] for name in os.environ if name.upper() in field_by_variable}
    for name in saved_variables:
        if field_by_variable[name.upper()] not in _MACHINE_SETTINGS:
            del os.environ[name]
    try:
        settings = Settings(state_dir=state_dir, **fields)
        os.environ.update(_to_variables(settings, {"state_dir", *fields}))
        yield settings
    finally:
        for name in [name for name in os.environ if name.upper() in field_by_variable]:
            del os.environ[name]
        os.environ.update(saved_variables)


def _to_variables(settings: Settings, names: set[str]) -> dict[str, str]:
    variables = {}
    for name in names:
        value = getattr(settings, name)
        if value is not None:
            raw_value = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
            variables[f"{_VARIABLE_PREFIX}{name}".upper()] = raw_value
    return variables


_PREFIX = "branchlake-throwaway-"
_OWNER_FILE = "owner.json"
_JAR_LISTING = "jars/jars.classpath"


class ThrowawayServer:
    """A Nessie server for throw-away lakes, one at a time. `main` is empty for each of them.

    `throwaway_server()` creates it. A Spark Connect server starts when an asset or a check first needs a
    session.
    """

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._in_use = False

    @contextlib.contextmanager
    def lake(self, **settings: Any) -> Iterator[ThrowawayLake]:
        """Open an empty lake on this server, with its own Dagster instance.

        Args:
            **settings: Fields of `Settings` for the behavior of the lake (`require_checks=False`).

        Yields:
            ThrowawayLake: The lake. While it is open, the `BRANCHLAKE_…` variables of the environment point
                to it.

        Raises:
            ConfigurationError: Another lake of this server is open, or a setting identifies another lake.
        """
        if self._in_use:
            raise ConfigurationError(
                "A throw-away lake of this server is already open.",
                hint="Close that lake first, or use a second throwaway_server().",
                reason="open_already",
            )
        self._in_use = True
        try:
            with settings_in_environment(str(self._state_dir), settings) as lake_settings:
                EmbeddedServers(lake_settings, volatile=True).endpoints(spark=False)
                lakehouse = Lakehouse(lake_settings)
                try:
                    _reset_nessie(lakehouse.nessie)
                    shutil.rmtree(self._state_dir / "warehouse", ignore_errors=True)
                    with dg.instance_for_test() as instance:
                        yield ThrowawayLake(lakehouse, instance)
                finally:
                    lakehouse.nessie.close()
        finally:
            self._in_use = False


@contextlib.contextmanager
def throwaway_server() -> Iterator[ThrowawayServer]:
    """Create a server for throw-away lakes that the tests of a session can share.

    The server starts when its first lake is opened. Its files are in a new folder of the system's temporary
    folder, which is removed at the end. If this process is killed, the next server removes the folder.

    Yields:
        ThrowawayServer: The server. Its `lake()` opens lakes.

    Examples:
        .. code-block:: python

            from branchlake_dagster.testing import throwaway_server

            with throwaway_server() as server:
                with server.lake() as lake:
                    ...
                with server.lake(require_checks=False) as lake:
                    ...
    """
    _remove_leftovers(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    state_dir = folder / "state"
    try:
        ProcessRecord("tests", os.getpid(), find_start_s(os.getpid()) or 0.0, 0).save(folder / _OWNER_FILE)
        _copy_jar_listing(Settings().state_dir, state_dir)
        yield ThrowawayServer(state_dir)
    finally:
        _remove_server(folder)


@contextlib.contextmanager
def throwaway_lake(**settings: Any) -> Iterator[ThrowawayLake]:
    """Create a lake for a test: an empty `main`, a warehouse and a Dagster instance, all removed at the end.

    Starts a Nessie server that keeps its store in memory. A Spark Connect server starts only if an asset or a
    check needs a Spark session. For several tests, share the server (`throwaway_server()`) or use the fixture
    `lake` of `branchlake_dagster.testing.fixtures`.

    Args:
        **settings: Fields of `Settings` for the behavior of the lake (`require_checks=False`). Settings of
            the environment are ignored, so that a test behaves the same on every machine. Exceptions are
            `ivy_settings`, `startup_timeout_s`, `spark_driver_memory` and `guard_nessie`.

    Yields:
        ThrowawayLake: The lake, which runs assets, publishes runs and reads tables.

    Raises:
        ConfigurationError: A setting would identify another lake (`nessie_uri`, `warehouse`, …).
        MissingExtra: The extra `embedded` is not installed.

    Examples:
        .. code-block:: python

            from branchlake_dagster.testing import throwaway_lake

            with throwaway_lake() as lake:
                result = lake.run(prices, prices_not_negative)
                outcome = lake.publish(result)
                assert outcome.published, outcome
                assert lake.table("prices").num_rows == 3
    """
    with throwaway_server() as server, server.lake(**settings) as lake:
        yield lake


def _reset_nessie(client: NessieClient) -> None:
    """Delete all branches, tags and tables by commits on `main`, whose history stays.

    Caches of this process may contain that history.
    """
    for ref in list(client.references()):
        if ref.name == MAIN:
            continue
        delete = client.delete_branch if ref.type is ReferenceType.BRANCH else client.delete_tag
        delete(ref.name, expected_hash=ref.hash)
    main_hash = ensure_main_has_commit(client)
    deletes = [Delete(entry.key) for entry in client.entries(MAIN)]
    if deletes:
        client.commit(MAIN, expected_hash=main_hash, operations=deletes, message="Empty for the next test")


def _copy_jar_listing(source_dir: Path, state_dir: Path) -> None:
    """Copy the list of Spark's jars from another state folder, if it exists, so that Ivy need not run.

    `source_dir` and `state_dir` are state folders; `state_dir` is new.
    """
    if (source_dir / _JAR_LISTING).is_file():
        (state_dir / _JAR_LISTING).parent.mkdir(parents=True)
        shutil.copy(source_dir / _JAR_LISTING, state_dir / _JAR_LISTING)


def _remove_server(folder: Path) -> None:
    with settings_in_environment(str(folder / "state"), {}) as settings:
        EmbeddedServers(settings).stop_all()
    shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(parent: Path) -> None:
    """Stop the servers of test processes that were killed, and remove their folders.

    `parent` is the folder with one folder for each test process. Folders of other users and of running
    processes stay.
    """
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # another test process removed it first
            owner = ProcessRecord.load(folder / _OWNER_FILE)
            if folder.stat().st_uid == os.getuid() and owner is not None and not owner.is_alive():
                _remove_server(folder)
