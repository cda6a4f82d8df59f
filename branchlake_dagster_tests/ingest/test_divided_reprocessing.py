"""The division of a reprocessing, with passes that fail as a test decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from branchlake_dagster.ingest import divided_reprocessing, reprocessing, scan
from branchlake_dagster.ingest.divided_reprocessing import StoredPass, require_all_read, run_divided_pass
from branchlake_dagster.ingest.errors import ColumnsUnknown, DeadLettersLeftOut, RecordsUnread
from branchlake_dagster.ingest.offsets import TopicPartition
from branchlake_dagster.ingest.record_frames import RecordPosition, find_unwritable_records
from branchlake_dagster.ingest.reprocessing import DeadLetterSelection
from branchlake_dagster.ingest.scan import ScanResult
from branchlake_dagster.ingest.schema_evolution import SchemaEvolution

_PARTITION = TopicPartition("orders", "0", 0)
_BAD = 300


class _WorkerEnded(Exception):  # noqa: N818 - like the exceptions of the package
    """The worker has ended."""


class _Frame:
    """The records at some positions. Conditions are sets of positions."""

    columns = ()

    def __init__(self, positions: Sequence[RecordPosition]) -> None:
        self.positions = list(positions)

    def where(self, condition: set[RecordPosition]) -> _Frame:
        return _Frame([one for one in self.positions if one in condition])


class _AllBut(set[RecordPosition]):
    """The condition that a record is none of these."""

    def __contains__(self, position: object) -> bool:
        return not super().__contains__(position)


class _OneOf(set[RecordPosition]):
    def __invert__(self) -> _AllBut:
        return _AllBut(self)


class _Tables:
    """The tables of an ingestion. The table `new` does not exist yet, and its columns are not declared."""

    ingest = SimpleNamespace(name="orders")

    def __init__(self, names: Sequence[str]) -> None:
        self.identifiers = self.declarations = {name: (name,) for name in names}

    def without_tables(self, names: Sequence[str]) -> _Tables:
        return _Tables([one for one in self.identifiers if one not in names])

    def without_unknown_columns(self) -> _Tables:
        return self.without_tables(["new"])


Divide = Callable[..., StoredPass]


@pytest.fixture
def divide(monkeypatch: pytest.MonkeyPatch) -> Divide:
    """Divide 1,000 records, of which `_BAD` ends its worker.

    The first argument returns whether pass number N fails for another reason. `new_table_offset` is the
    offset of the only record of a new table, if there is one.
    """
    monkeypatch.setattr(divided_reprocessing, "restore_tables", lambda *_, **__: None)
    monkeypatch.setattr(divided_reprocessing, "delete_files", lambda *_: None)
    monkeypatch.setattr(
        divided_reprocessing, "_count_positions", lambda frame: dict.fromkeys(frame.positions, 2)
    )
    monkeypatch.setattr(divided_reprocessing, "_is_between", lambda positions, prefix="": set(positions))
    monkeypatch.setattr(divided_reprocessing, "_is_one_of", _OneOf)

    def run(
        fails: Callable[[int], bool] = lambda _: False, new_table_offset: int | None = None
    ) -> StoredPass:
        passes = iter(range(10_000))

        def evolve(frame: Any, tables: Any) -> Any:
            if "new" in tables.identifiers and (_PARTITION, new_table_offset) not in frame.positions:
                raise ColumnsUnknown("", table="new")
            if fails(next(passes)) or (_PARTITION, _BAD) in frame.positions:
                raise _WorkerEnded
            return SchemaEvolution(tables, cast("Any", None), cast("Any", None))

        tables = _Tables(["old"] if new_table_offset is None else ["old", "new"])
        context = SimpleNamespace(
            lake=SimpleNamespace(nessie=SimpleNamespace(reference=lambda _: SimpleNamespace(hash="0"))),
            branch="run",
            commit_properties={},
            session=lambda: SimpleNamespace(createDataFrame=lambda *_: _Frame(())),
        )
        frame = _Frame([(_PARTITION, offset) for offset in range(1_000)])
        return run_divided_pass(cast("Any", frame), cast("Any", tables), cast("Any", context), evolve)

    return run


def test_only_the_record_that_ends_its_worker_is_unwritable(divide: Divide) -> None:
    assert [*divide().unwritable] == [(_PARTITION, _BAD)]


@pytest.mark.parametrize("new_table_offset", [10, 700])
def test_it_is_found_among_records_that_lack_the_columns_of_a_new_table(
    divide: Divide, new_table_offset: int
) -> None:
    stored_pass = divide(new_table_offset=new_table_offset)
    assert [*stored_pass.unwritable] == [(_PARTITION, _BAD)]
    assert "new" in stored_pass.evolution.ingestion_tables.identifiers


def test_a_new_table_of_unwritable_records_alone_may_be_declared_wrongly(divide: Divide) -> None:
    with pytest.raises(_WorkerEnded):
        divide(new_table_offset=_BAD)


def test_a_first_part_may_lack_the_columns_of_a_new_table(
    divide: Divide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search ends early, and then the parts without failing records fail together."""
    search = partial(find_unwritable_records, max_passes=5)
    monkeypatch.setattr(divided_reprocessing, "find_unwritable_records", search)
    stored_pass = divide(lambda number: number == 7, new_table_offset=260)
    assert [*stored_pass.evolution.ingestion_tables.identifiers] == ["old"]
    assert (stored_pass.unwritable, stored_pass.reached_count) == ({}, 500)


@pytest.mark.parametrize(("read_count", "record_count"), [(3, 3), (3, 2), (2, 3)])
def test_a_pass_reads_all_selected_records(read_count: int, record_count: int) -> None:
    """A late commit of an earlier attempt may have marked more dead letters; the commit finds that out."""
    evolution: Any = SimpleNamespace(scanned=ScanResult(counts=Counter(records=read_count)))
    context: Any = SimpleNamespace(branch="run", run_id="1")
    with nullcontext() if read_count >= record_count else pytest.raises(RecordsUnread):
        require_all_read(StoredPass(evolution), record_count, context)


@pytest.mark.parametrize("failing", ["count", "unmark", "left_out", "commit"])
def test_the_files_of_a_pass_are_deleted_if_a_later_step_fails(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    deleted = []
    scanned = ScanResult(counts=Counter(records=1 if failing == "count" else 2))
    scanned.counts["left_out"] = failing == "left_out"
    evolution: Any = SimpleNamespace(scanned=scanned, targets="targets", ingestion_tables=None)
    reached: Any = "condition" if failing == "unmark" else None
    stored_pass = StoredPass(evolution, reached=reached, reached_count=2 if reached else None)
    tables: Any = SimpleNamespace(dead_letter_table=SimpleNamespace(metadata=SimpleNamespace(properties={})))

    def fail(*_: object) -> None:
        raise KeyError

    steps = {
        "IcebergTableFormat": None,
        "load_ingestion_tables": tables,
        "require_reprocessable_tables": {},
        "_mark_selected": None,
        "_count_by_topic": [("orders", "0", 2)],
        "run_divided_pass": stored_pass,
        "add_unwritable_dead_letters": None,
    }
    for name, result in steps.items():
        monkeypatch.setattr(reprocessing, name, lambda *_, result=result: result)
    for name in ("_unmark_others", "_commit_rows"):
        monkeypatch.setattr(reprocessing, name, fail)
    monkeypatch.setattr(scan, "delete_files", lambda *arguments: deleted.append(arguments))
    ingest: Any = SimpleNamespace(name="orders", format=None)
    with pytest.raises((KeyError, RecordsUnread, DeadLettersLeftOut)):
        reprocessing.reprocess_batch(ingest, MagicMock(run_id="1", branch="run"), DeadLetterSelection())
    assert deleted == [(scanned, "targets", None)]


@pytest.mark.parametrize("first", range(1, 20))
def test_an_outage_during_the_division_makes_no_good_record_unwritable(divide: Divide, first: int) -> None:
    """Dead letters of good records would have to be reprocessed, and `--from-raw` would remove their rows."""
    try:
        unwritable = divide(lambda number: first <= number < first + 40).unwritable
    except _WorkerEnded:
        return
    assert [*unwritable] == [(_PARTITION, _BAD)]


def test_an_outage_that_ends_before_a_record_is_alone_does_no_harm(divide: Divide) -> None:
    assert [*divide(lambda number: 3 <= number < 6).unwritable] == [(_PARTITION, _BAD)]
