"""Commits of `NessieCatalog` that meet another writer or lose their answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table.update import SetPropertiesUpdate

from branchlake_dagster.catalog import NessieCatalog
from branchlake_dagster.nessie import NessieClient
from branchlake_dagster.nessie.errors import (
    NessieConflict,
    NessieOutcomeUnknown,
    NessieUnavailable,
    ReferenceNotFound,
)
from branchlake_dagster.nessie.model import CommitResult

SCHEMA = pa.schema([("id", pa.int64())])


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": list(ids)})


def ids(catalog: NessieCatalog) -> list[int]:
    return sorted(catalog.load_table("db.t").scan().to_arrow()["id"].to_pylist())


class Meddler(NessieClient):
    """A client with something happening around its next commit."""

    before: Callable[[], Any] | None = None
    after: Callable[[], Any] | None = None
    instead: Exception | None = None

    def commit(self, branch: str, **options: Any) -> CommitResult:
        before, self.before = self.before, None
        instead, self.instead = self.instead, None
        after, self.after = self.after, None
        if before:
            before()
        if instead:
            raise instead
        result = super().commit(branch, **options)
        if after:
            after()
            raise NessieOutcomeUnknown("the answer was lost")
        return result


@pytest.fixture
def meddler(nessie_uri: str) -> Iterator[Meddler]:
    with Meddler(nessie_uri) as client:
        yield client


@pytest.fixture
def warehouse(tmp_path: Path) -> str:
    return f"file://{tmp_path}/wh"


@pytest.fixture
def other(client: NessieClient, fresh_branch: str, warehouse: str) -> NessieCatalog:
    """Another writer on the same branch."""
    catalog = NessieCatalog.from_client(client, fresh_branch, warehouse)
    catalog.create_namespace("db")
    return catalog


@pytest.fixture
def catalog(meddler: Meddler, other: NessieCatalog, warehouse: str) -> NessieCatalog:
    return NessieCatalog.from_client(meddler, other.ref, warehouse)


def files(tmp_path: Path) -> set[Path]:
    return {path for path in tmp_path.rglob("*") if path.is_file()}


def test_a_concurrent_change_fails_the_commit(
    catalog: NessieCatalog, other: NessieCatalog, meddler: Meddler
) -> None:
    table = catalog.create_table("db.t", SCHEMA)
    meddler.before = lambda: other.load_table("db.t").append(rows(1))
    with pytest.raises(CommitFailedException) as caught:
        catalog.commit_table(table, (), (SetPropertiesUpdate(updates={"a": "b"}),))
    assert isinstance(caught.value.__cause__, NessieConflict)  # Nessie refused the commit
    assert ids(other) == [1]


def test_pyiceberg_replays_an_append_over_another(
    catalog: NessieCatalog, other: NessieCatalog, meddler: Meddler
) -> None:
    table = catalog.create_table("db.t", SCHEMA)
    meddler.before = lambda: other.load_table("db.t").append(rows(1))
    table.append(rows(2))
    assert ids(other) == [1, 2]


def test_a_stale_requirement_fails_the_commit(catalog: NessieCatalog, other: NessieCatalog) -> None:
    table = catalog.create_table("db.t", SCHEMA, properties={"commit.retry.num-retries": "0"})
    other.load_table("db.t").append(rows(1))
    with pytest.raises(CommitFailedException) as caught:
        table.append(rows(2))
    assert caught.value.__cause__ is None  # PyIceberg's requirement failed, before a commit was sent
    assert ids(other) == [1]


def test_a_table_that_was_dropped_meanwhile(
    catalog: NessieCatalog, other: NessieCatalog, meddler: Meddler
) -> None:
    table = catalog.create_table("db.t", SCHEMA, properties={"commit.retry.num-retries": "0"})
    meddler.before = lambda: other.drop_table("db.t")
    with pytest.raises(CommitFailedException):
        table.append(rows(1))
    with pytest.raises(NoSuchTableError):
        table.refresh().append(rows(1))


def test_a_deleted_branch_fences_its_late_writer(
    catalog: NessieCatalog, client: NessieClient, meddler: Meddler, other: NessieCatalog
) -> None:
    table = catalog.create_table("db.t", SCHEMA)
    meddler.before = lambda: client.delete_branch(other.ref, expected_hash=client.reference(other.ref).hash)
    with pytest.raises(ReferenceNotFound):
        table.append(rows(1))


def test_many_writers_lose_nothing(nessie_uri: str, other: NessieCatalog, warehouse: str) -> None:
    other.create_table("db.t", SCHEMA, properties={"commit.retry.num-retries": "30"})

    def write(i: int) -> None:
        with NessieClient(nessie_uri) as own:
            NessieCatalog.from_client(own, other.ref, warehouse).load_table("db.t").append(rows(i))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(8)))
    assert ids(other) == list(range(8))


def test_a_name_that_somebody_else_took(
    catalog: NessieCatalog, other: NessieCatalog, meddler: Meddler
) -> None:
    meddler.before = lambda: other.create_table("db.t", SCHEMA)
    with pytest.raises(TableAlreadyExistsError):
        catalog.create_table("db.t", SCHEMA)
    meddler.before = lambda: other.create_namespace("new")
    with pytest.raises(NamespaceAlreadyExistsError):
        catalog.create_namespace("new")
    meddler.before = lambda: other.drop_table("db.t")
    with pytest.raises(NoSuchTableError):
        catalog.drop_table("db.t")


def test_a_drop_wins_over_an_append(catalog: NessieCatalog, other: NessieCatalog, meddler: Meddler) -> None:
    table = other.create_table("db.t", SCHEMA)
    meddler.before = lambda: table.append(rows(1))
    catalog.drop_table("db.t")
    assert not other.table_exists("db.t")


def test_property_updates_are_not_lost(
    catalog: NessieCatalog, other: NessieCatalog, meddler: Meddler
) -> None:
    meddler.before = lambda: other.update_namespace_properties("db", updates={"theirs": "1"})
    catalog.update_namespace_properties("db", updates={"ours": "2"})
    assert other.load_namespace_properties("db") == {"theirs": "1", "ours": "2"}


def test_changes_that_never_stop_fail_in_the_end(
    catalog: NessieCatalog, other: NessieCatalog, meddler: Meddler
) -> None:
    table = other.create_table("db.t", SCHEMA)

    def meddle() -> None:
        table.append(rows(1))
        meddler.before = meddle

    meddler.before = meddle
    with pytest.raises(CommitFailedException) as caught:
        catalog.drop_table("db.t")
    assert isinstance(caught.value.__cause__, NessieConflict)
    assert other.table_exists("db.t")


def test_a_lost_answer_is_found_by_the_metadata_file(
    catalog: NessieCatalog, other: NessieCatalog, meddler: Meddler
) -> None:
    meddler.after = lambda: None
    table = catalog.create_table("db.t", SCHEMA)
    meddler.after = lambda: None
    table.append(rows(1))
    assert ids(other) == [1]
    assert len(table.history()) == 1


def test_an_unknown_outcome_deletes_nothing(
    catalog: NessieCatalog, other: NessieCatalog, meddler: Meddler, tmp_path: Path
) -> None:
    table = catalog.create_table("db.t", SCHEMA)
    before = files(tmp_path)
    meddler.instead = NessieOutcomeUnknown("the answer was lost")
    with pytest.raises(CommitStateUnknownException) as caught:
        table.append(rows(1))
    assert isinstance(caught.value.__cause__, NessieOutcomeUnknown)
    written = files(tmp_path) - before
    # Data, manifest, manifest list and table metadata are all still there for whoever finds the commit.
    assert {path.suffix for path in written} == {".parquet", ".avro", ".json"}
    # The request was only late: the server applies it after we gave up.
    (late,) = (path for path in written if path.suffix == ".json")
    other.register_table("db.t", f"file://{late}", overwrite=True)
    assert ids(other) == [1]


def test_an_unknown_outcome_that_others_built_upon_stays_unknown(
    catalog: NessieCatalog, other: NessieCatalog, meddler: Meddler
) -> None:
    table = catalog.create_table("db.t", SCHEMA)
    meddler.after = lambda: other.load_table("db.t").append(rows(2))
    with pytest.raises(CommitStateUnknownException):
        table.append(rows(1))
    assert ids(other) == [1, 2]


def test_an_unknown_drop_says_so(catalog: NessieCatalog, meddler: Meddler) -> None:
    catalog.create_table("db.t", SCHEMA)
    meddler.instead = NessieOutcomeUnknown("the answer was lost")
    with pytest.raises(CommitStateUnknownException):
        catalog.drop_table("db.t")


def test_an_unavailable_server_is_not_a_failed_commit(catalog: NessieCatalog, meddler: Meddler) -> None:
    table = catalog.create_table("db.t", SCHEMA)
    meddler.instead = NessieUnavailable("down")
    with pytest.raises(NessieUnavailable):
        table.append(rows(1))
