"""A Postgres of the test's own, from the system's packages, with the databases that deploy/ makes."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from branchlake_dagster.embedded.process import LOOPBACK

ACCOUNT = "postgres"
"""Postgres refuses to run as root; the system's package brings this account."""


def programs() -> Path | None:
    """The folder with `initdb` and `pg_ctl`: on the PATH, or Debian's of the newest version; None without."""
    found = shutil.which("initdb")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return Path(found).resolve().parent if found else (debian[-1].parent if debian else None)


@contextmanager
def running(programs: Path, port: int, databases: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Postgres on `port` of loopback, prepared by the script `databases`; gone with its data afterwards.

    `environment` holds the passwords; POSTGRES_PASSWORD is the superuser's.
    """
    folder = Path(tempfile.mkdtemp(prefix="branchlake-postgres-"))
    account = {"user": ACCOUNT, "group": ACCOUNT} if os.geteuid() == 0 else {}
    if account:
        shutil.chown(folder, ACCOUNT, ACCOUNT)

    def call(*command: str) -> None:
        _call([str(programs / command[0]), *command[1:]], cwd=folder, **account)

    secret = folder / "password"
    secret.write_text(environment["POSTGRES_PASSWORD"])
    secret.chmod(0o644)
    data = str(folder / "data")
    call("initdb", "-D", data, "-U", "postgres", "-A", "scram-sha-256", "--pwfile", str(secret), "-N")
    options = f"-p {port} -h {LOOPBACK} -k {folder} -c fsync=off"
    call("pg_ctl", "-D", data, "-l", str(folder / "log"), "-o", options, "-w", "start")
    try:
        told = {"PGHOST": LOOPBACK, "PGPORT": str(port), "PGPASSWORD": environment["POSTGRES_PASSWORD"]}
        path = f"{programs}:{os.environ['PATH']}"
        _call(["sh", str(databases)], cwd=folder, env={**os.environ, **environment, **told, "PATH": path})
        yield
    finally:
        call("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
        shutil.rmtree(folder)


def _call(command: Sequence[str], **options: object) -> None:
    # To a file: the server inherits the output, and a pipe would not end before it does.
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, **options)
        output.seek(0)
        assert done.returncode == 0, f"{command[0]}: {output.read()}"
