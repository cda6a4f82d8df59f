"""Compactions without Spark: PyIceberg rewrites the files of each partition on a compaction's branch."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Collection
from contextlib import ExitStack

from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.table import Table

from branchlake_dagster.compaction.compaction_branch import open_branch
from branchlake_dagster.compaction.rewritten_files import list_rewritten_partitions
from branchlake_dagster.compaction.table_publication import (
    RewrittenTable,
    TablePublication,
    TablePublisher,
)
from branchlake_dagster.internals.pyiceberg import commit_compaction, write_data_files
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.model import IcebergTable
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.runs.branch_owner import branch_filter
from branchlake_dagster.stored_names import ReferencePrefix
from branchlake_dagster_tests.publication.workbench import Run, Workbench


def rewrite_files(table: Table, partitions: Collection[str] = ("a", "b"), *, skip_rows: int = 0) -> None:
    """Write the rows of each of the partitions to one new file; `skip_rows` of each get lost."""
    transaction, commit_id, numbers = table.transaction(), uuid.uuid4(), itertools.count()
    producer = transaction.update_snapshot().overwrite(commit_uuid=commit_id)
    tasks = sorted(table.scan().plan_files(), key=lambda task: str(task.file.partition))
    for _, group in itertools.groupby(tasks, key=lambda task: str(task.file.partition)):
        members = list(group)
        if table.spec().fields and members[0].file.partition[0] not in partitions:
            continue
        scan = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue())
        for task in members:
            producer.delete_data_file(task.file)
        rows = scan.to_table(members).slice(skip_rows)
        for new_file in write_data_files(table.metadata, rows, table.io, commit=commit_id, numbers=numbers):
            producer.append_data_file(new_file)
    commit_compaction(transaction, producer)


class Rewriting:
    """A compaction of a workbench's table `t`, whose files are rewritten, but not published."""

    def __init__(self, bench: Workbench, partitions: Collection[str] = ("a", "b")) -> None:
        self.bench = bench
        self._stack = ExitStack()
        nessie, key = bench.lake.nessie, bench.key()
        branch = self._stack.enter_context(open_branch(nessie))
        before = nessie.contents(branch.name, [key])[key]
        table = bench.lake.catalog(branch.name).load_table((bench.namespace, "t"))
        rewrite_files(table, partitions)
        after = nessie.contents(branch.name, [key])[key]
        assert isinstance(before, IcebergTable)
        assert isinstance(after, IcebergTable)
        self.tables = IcebergTableFormat(bench.lake.catalog())
        change = self.tables.load_change(key, before, after)
        self.rewritten = RewrittenTable(
            key, branch.name, branch.hash, before, after, tuple(list_rewritten_partitions("t", change))
        )

    def publish(self, client: NessieClient | None = None, **options: bool) -> TablePublication:
        """Publish it, and delete its branch."""
        publisher = TablePublisher(client or self.bench.lake.nessie, self.tables)
        try:
            return publisher.publish(self.rewritten, **options)
        finally:
            self._stack.close()


def open_run(bench: Workbench) -> Run:
    """A run whose branch has a name as in production. The test deletes it."""
    base = bench.lake.nessie.reference(MAIN).hash
    run = Run(bench, str(uuid.uuid4()), base)
    bench.lake.nessie.create_branch(run.name, from_ref=MAIN, from_hash=base)
    return run


def discard_open_runs(lake: Lakehouse) -> None:
    """Delete the branches of runs that earlier tests of this process left open in the session's lake.

    While any run is open, a compaction applies no delete files.
    """
    for branch in list(lake.nessie.references(filter=branch_filter(ReferencePrefix.RUN))):
        lake.nessie.delete_branch(branch.name, expected_hash=branch.hash)
