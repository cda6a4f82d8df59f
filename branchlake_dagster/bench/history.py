"""What a long history costs: a table of thousands of snapshots, a `main` of tens of thousands of commits."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import NestedField, StringType

from branchlake_dagster.internals.pyiceberg import write_metadata
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import ContentKey, Unchanged
from branchlake_dagster.publication.ledger import Candidate, Publication, Published, properties, write_set
from branchlake_dagster.publication.main_log import MainLog
from branchlake_dagster.publication.publisher import publisher_of
from branchlake_dagster.runs.run_branch import branch_name

_NAMESPACE = "history"
_SCHEMA = Schema(NestedField(1, "token", StringType(), required=False))
_ROUNDS = 3


def rebase_ms(lake: Lakehouse, snapshots: int) -> float:
    """The median of rebasing a run's append on a table with a history of `snapshots`."""
    _table_with_history(lake, f"t{snapshots}", snapshots)
    identifier = (_NAMESPACE, f"t{snapshots}")
    took = []
    for _ in range(_ROUNDS):
        base, run_id = lake.nessie.reference(MAIN).hash, str(uuid.uuid4())
        name = branch_name(run_id)
        lake.nessie.create_branch(name, from_ref=MAIN, from_hash=base)
        for ref in (name, MAIN):
            _append(lake.catalog(ref).load_table(identifier), run_id)
        head = lake.nessie.reference(name)
        changes = write_set(lake.nessie, base, head)
        candidate = Candidate(name, head.hash, base, run_id, run_id, "passed", changes)
        began = time.perf_counter()
        (result,) = publisher_of(lake).publish([candidate]).values()
        took.append(1000 * (time.perf_counter() - began))
        if not isinstance(result, Published):
            raise RuntimeError(f"A benchmark's publication failed: {result}")
        lake.nessie.delete_branch(name, expected_hash=head.hash)
    return round(statistics.median(took), 1)


def _append(table: Table, run_id: str) -> None:
    told = {"branchlake.write_mode": "append", "branchlake.run_id": run_id}
    table.append(pa.table({"token": [str(uuid.uuid4())]}), snapshot_properties=told)


def _table_with_history(lake: Lakehouse, name: str, snapshots: int) -> None:
    """A table whose metadata names its one snapshot many times, in a chain of parents.

    Written one after the other they would take an hour, because every commit writes them all again.
    """
    catalog = lake.catalog()
    if not catalog.namespace_exists((_NAMESPACE,)):
        catalog.create_namespace((_NAMESPACE,))
    table = catalog.create_table((_NAMESPACE, "made"), _SCHEMA)
    _append(table, "history")
    location = table.metadata_location.replace(".metadata.json", f"-{snapshots}.metadata.json")
    write_metadata(catalog, _with_history(table.metadata, snapshots), table.io, location)
    catalog.drop_table((_NAMESPACE, "made"))
    catalog.register_table((_NAMESPACE, name), location)


def _with_history(metadata: TableMetadata, count: int) -> TableMetadata:
    (last,) = metadata.snapshots
    ids = [*range(1, count), last.snapshot_id]
    parents = [None, *ids]
    chain = [
        last.model_copy(
            update={"snapshot_id": one, "parent_snapshot_id": parent, "sequence_number": number + 1}
        )
        for number, (one, parent) in enumerate(zip(ids, parents, strict=False))
    ]
    entry = metadata.snapshot_log[-1]
    log = [entry.model_copy(update={"snapshot_id": one}) for one in ids]
    return metadata.model_copy(
        update={"snapshots": chain, "snapshot_log": log, "last_sequence_number": count}
    )


def ledger_ms(lake: Lakehouse, commits: int, *, say: Callable[[str], None]) -> tuple[float, float]:
    """Looking a branch up whose base is `commits` ago: the first one of a process, and every other one."""
    client = lake.nessie
    base = head = client.reference(MAIN).hash
    (entry,) = [one for one in client.entries(MAIN) if one.key == ContentKey([_NAMESPACE])]
    for number in range(commits):
        one = Publication(f"run-{uuid.uuid4()}", str(number), str(number), "passed", base, ("history.t",))
        head = client.commit(
            MAIN,
            expected_hash=head,
            operations=[Unchanged(entry.key)],
            message="published",
            properties=properties([one]),
        ).hash
        if number % 10_000 == 9_999:
            say(f"{number + 1:,} of {commits:,} commits are made.")
    log = MainLog()
    took = []
    for _ in range(20):
        began = time.perf_counter()
        if log.already_published(client, f"run-{uuid.uuid4()}", base=base, at=client.reference(MAIN).hash):
            raise RuntimeError("A branch was found that nobody has published.")
        took.append(1000 * (time.perf_counter() - began))
    return round(took[0], 1), round(statistics.median(took[1:]), 1)
