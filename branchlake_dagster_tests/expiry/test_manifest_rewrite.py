"""Merged manifests list the same files, and nobody takes the snapshot for a change of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyiceberg.table.snapshots import Operation

from branchlake_dagster.expiry.forward_commit import ExpiryUnknown
from branchlake_dagster.expiry.manifest_rewrite import ManifestRewriter, RewrittenManifests
from branchlake_dagster.history.capture import capture_change, current_position
from branchlake_dagster.history.manifests import read_manifest_entries, read_manifests
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.errors import NessieOutcomeUnknown
from branchlake_dagster.publication.ledger import NeedsChecks, Published
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.undo.find_publication import find_publication
from branchlake_dagster.undo.publication_undo import PublicationUndo
from branchlake_dagster_tests.expiry.test_snapshot_expiry import appended, faulty, seeded
from branchlake_dagster_tests.publication.workbench import Workbench, frame
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse
pytestmark = pytest.mark.filterwarnings("ignore:Delete operation did not match")


@pytest.fixture
def bench(lakehouse: Lakehouse, namespace: str) -> Iterator[Workbench]:
    bench = Workbench(lakehouse, namespace)
    yield bench
    bench.clean()


def rewritten(bench: Workbench, min_count: int = 2) -> RewrittenManifests:
    (result,) = ManifestRewriter.of_lake(bench.lake).run([bench.key().name], min_count=min_count)
    if result.error is not None:
        raise result.error
    return result


def entries(bench: Workbench) -> set[tuple[Any, ...]]:
    """The live files of the table, each with its snapshot and sequence numbers."""
    table = bench.main()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    return {
        (entry.data_file.file_path, entry.snapshot_id, entry.sequence_number, entry.file_sequence_number)
        for manifest in read_manifests(table.io, snapshot)
        for entry in manifest.fetch_manifest_entry(table.io)
    }


@memory.ON_BOTH
def test_the_same_files_are_listed_in_one_manifest(bench: Workbench) -> None:
    seeded(bench, 6)
    before, rows = entries(bench), bench.rows()
    result = rewritten(bench)
    assert (result.count_before, result.count_after) == (6, 1)
    assert (entries(bench), bench.rows()) == (before, rows)
    snapshot = bench.main().current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary.operation is Operation.REPLACE
    commit = next(iter(bench.lake.nessie.log(MAIN))).commit
    assert commit.hash == result.commit
    assert LakeProperty.PUBLICATION_ID not in commit.properties
    assert rewritten(bench).commit is None
    appended(bench, 6)
    assert len(bench.rows()) == 7


def test_few_manifests_are_not_worth_a_commit(bench: Workbench) -> None:
    seeded(bench, 4)
    head = bench.lake.nessie.reference(MAIN).hash
    assert rewritten(bench, min_count=5).count_before == 4
    assert bench.lake.nessie.reference(MAIN).hash == head


def test_open_runs_are_published(bench: Workbench) -> None:
    seeded(bench, 4)
    adding, replacing, loser = bench.run(), bench.run(), bench.run()
    adding.append([("b", 1)])
    replacing.replace("c", [("c", 1)])
    loser.replace("a", [("a", 100)])
    rewritten(bench)
    bench.published(adding)
    bench.published(replacing)
    rewritten(bench)
    bench.published(loser)
    assert bench.rows() == [("a", 100), ("b", 1), ("c", 1)]


def test_no_check_is_repeated_and_what_was_read_is_the_same(bench: Workbench) -> None:
    seeded(bench, 4)
    checked, reader, replacing = bench.run(), bench.run(reads=["t"]), bench.run()
    checked.append([("b", 1)])
    reader.create("other")
    replacing.replace_table([("z", 1)])
    rewritten(bench)
    bench.published(reader)
    bench.published(replacing)
    assert bench.rows() == [("z", 1)]
    results = bench.publisher.publish([checked.candidate(frozenset({bench.key()}))])
    assert isinstance(results[checked.name], NeedsChecks)  # the other run replaced all rows
    bench.main().append(frame([("y", 1)]))
    late = bench.run()
    late.append([("b", 3)])
    rewritten(bench)
    results = bench.publisher.publish([late.candidate(frozenset({bench.key()}))])
    assert isinstance(results[late.name], Published)


def test_a_consumer_sees_no_change(bench: Workbench) -> None:
    seeded(bench, 3)
    position = current_position(bench.main())
    appended(bench, 3)
    rewritten(bench)
    appended(bench, 4)
    change = capture_change(bench.main(), position, name="t")
    assert ([file.rows for file in change.added], change.removed) == ([1, 1], ())


def test_a_publication_before_it_is_undone(bench: Workbench) -> None:
    seeded(bench, 3)
    (run,) = appended(bench, 3)
    appended(bench, 4)
    rewritten(bench)
    undoer = PublicationUndo(bench.lake.nessie, IcebergTableFormat(bench.lake.catalog()))
    assert undoer.undo(find_publication(bench.lake.nessie, run.run_id)).commit is not None
    assert bench.rows() == [("a", number) for number in (0, 1, 2, 4)]


def test_lost_replies(bench: Workbench) -> None:
    seeded(bench, 4)
    client = faulty(bench, "lost")._client
    result = ManifestRewriter(client, bench.lake.catalog()).rewrite_table(bench.key(), min_count=2)
    assert (result.commit, result.count_after) == (bench.lake.nessie.reference(MAIN).hash, 1)
    appended(bench, 4)
    client = faulty(bench, *["dropped"] * 5)._client
    with pytest.raises(ExpiryUnknown) as caught:
        ManifestRewriter(client, bench.lake.catalog()).rewrite_table(bench.key(), min_count=2)
    assert isinstance(caught.value.__cause__, NessieOutcomeUnknown)
    assert len(bench.rows()) == 5


def test_a_missing_manifest_stops_it_and_leaves_nothing(bench: Workbench) -> None:
    seeded(bench, 4)
    table = bench.main()
    snapshot = table.current_snapshot()
    assert snapshot is not None
    manifest = next(iter(read_manifests(table.io, snapshot)))
    assert list(read_manifest_entries(table.io, manifest))
    table.io.delete(manifest.manifest_path)
    (result,) = ManifestRewriter.of_lake(bench.lake).run([bench.key().name], min_count=2)
    assert result.error is not None
    assert bench.main().metadata_location == table.metadata_location
