"""Looking for secrets where they do not belong: in files, in processes, in what a run left in Dagster and Nessie."""

from __future__ import annotations

import stat
from collections.abc import Collection, Iterator
from pathlib import Path

import dagster as dg

from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse

from .guard import forms


def in_text(text: str, secrets: Collection[str]) -> bool:
    """Whether a reader of the text learns one of the secrets."""
    return any(form in text for secret in secrets for form in forms(secret))


def in_files(root: Path, secrets: Collection[str]) -> list[Path]:
    """The files under `root` that hold one of the secrets, also in other encodings of text."""
    wanted = {
        form.encode(code) for secret in secrets for form in forms(secret) for code in ("utf-8", "utf-16-le")
    }
    found = []
    for path in root.rglob("*"):
        try:
            if path.is_file() and any(form in (content := path.read_bytes()) for form in wanted):
                assert content
                found.append(path)
        except FileNotFoundError:  # a server's scratch file
            continue
    return found


def is_private(path: Path) -> bool:
    """Whether only its owner may read it."""
    return stat.S_IMODE(path.stat().st_mode) == 0o600


def in_command_lines(secrets: Collection[str]) -> list[str]:
    """The processes of this machine that show one of the secrets to everybody."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if in_text(line, secrets):
            found.append(entry.parent.name)
    return found


def of_dagster(instance: dg.DagsterInstance) -> Iterator[str]:
    """All that an instance knows of its runs: tags, configuration, every event, as it is stored."""
    for run in instance.get_runs():
        yield dg.serialize_value(run)
        for entry in instance.all_logs(run.run_id):
            yield dg.serialize_value(entry)


def of_nessie(lake: Lakehouse, since: str) -> Iterator[str]:
    """Every commit since then on any reference, with author, message, properties and operations."""
    for ref in lake.nessie.references(fetch_metadata=True):
        yield repr(ref)
        log = lake.nessie.log(
            ref.pinned_ref, since=since if ref.name == MAIN else None, limit=50, fetch_operations=True
        )
        yield from map(repr, log)


def of_tables(lake: Lakehouse, namespace: str) -> Iterator[str]:
    """The metadata of the tables of a namespace on `main`, with properties and snapshot summaries."""
    catalog = lake.catalog()
    for identifier in catalog.list_tables((namespace,)):
        table = catalog.load_table(identifier)
        yield table.metadata.model_dump_json()
        yield repr((table, table.io.properties, catalog.properties))
