"""The program of `make lock-jars`, which writes the lock file of the jars.

Run it after the version of a jar has changed.

A jar that the lock file already names must still have the same digest, because released artifacts never
change. The digest of a new jar is that of Ivy's download, which Ivy compared with the checksum of the
repository.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from branchlake_dagster.embedded.jars import (
    ICEBERG_AWS,
    ICEBERG_SPARK,
    LOCK_FILE,
    NESSIE_SERVER,
    SPARK_KAFKA,
    JarRefused,
    compute_sha256,
    format_lock,
    read_lock,
    resolve_class_path,
    resolve_jars,
)
from branchlake_dagster.ingest.embedded_kafka import BROKER, BROKER_LOGGING
from branchlake_dagster.settings import Settings


def compute_digests(paths: Iterable[Path], lock: dict[str, str]) -> dict[str, str]:
    """Return the SHA-256 digest of each jar by its file name.

    Raises JarRefused if `lock` has another digest for a jar.
    """
    digests = {}
    for path in paths:
        digest = compute_sha256(path)
        if lock.get(path.name, digest) != digest:
            raise JarRefused(path, lock[path.name], digest)
        digests[path.name] = digest
    return digests


def download_server_jars(ivy_settings: Path | None, say: Callable[[str], None]) -> list[Path]:
    """Return all jars that an embedded server can load, downloaded if necessary, without verification.

    `ivy_settings` is a settings file for Ivy, or None for Ivy's own settings. `say` is called with a message
    before a download. The jars are in Ivy's cache.
    """
    with TemporaryDirectory(prefix="branchlake-lock-") as name:
        folder = Path(name)
        servers = [ICEBERG_SPARK, ICEBERG_AWS, *SPARK_KAFKA, NESSIE_SERVER]
        server_paths = resolve_jars(
            servers, folder / "servers", ivy_settings=ivy_settings, notify=say, verify=_accept_all_jars
        )
        logging_paths = resolve_jars(
            [BROKER_LOGGING],
            folder / "broker",
            ivy_settings=ivy_settings,
            notify=say,
            verify=_accept_all_jars,
        )
        broker_paths = resolve_class_path(
            BROKER, folder / "broker", ivy_settings=ivy_settings, notify=say, verify=_accept_all_jars
        )
        return [*server_paths.values(), *logging_paths.values(), *broker_paths]


def _accept_all_jars(_: Iterable[Path]) -> None:
    """Accept every jar, because `compute_digests` compares the jars afterwards."""


def main() -> None:
    """Write the lock file, and print which jars were added and removed."""
    lock = read_lock(LOCK_FILE) if LOCK_FILE.exists() else {}
    digests = compute_digests(
        download_server_jars(Settings().ivy_settings, lambda message: click.echo(message, err=True)), lock
    )
    LOCK_FILE.write_text(format_lock(digests))
    for sign, names in (("+", digests.keys() - lock.keys()), ("-", lock.keys() - digests.keys())):
        for jar in sorted(names):
            click.echo(f"{sign} {jar}")
    click.echo(f"{LOCK_FILE}: {len(digests)} jars.")


if __name__ == "__main__":
    main()
