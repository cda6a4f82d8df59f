"""The division of a reprocessing, with passes that fail as a test decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from branchlake_dagster.ingest import divided_reprocessing
from branchlake_dagster.ingest.divided_reprocessing import StoredPass, run_divided_pass
from branchlake_dagster.ingest.offsets import TopicPartition
from branchlake_dagster.ingest.record_frames import RecordPosition

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


@pytest.fixture
def divide(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], bool]], StoredPass]:
    """Divide 1,000 records, of which `_BAD` ends its worker.

    The argument returns whether pass number N fails for another reason.
    """
    monkeypatch.setattr(divided_reprocessing, "restore_tables", lambda *_, **__: None)
    monkeypatch.setattr(divided_reprocessing, "delete_files", lambda *_: None)
    monkeypatch.setattr(divided_reprocessing, "_collect_positions", lambda frame: frame.positions)
    monkeypatch.setattr(divided_reprocessing, "_is_between", lambda positions, prefix="": set(positions))
    monkeypatch.setattr(divided_reprocessing, "_is_one_of", _OneOf)

    def run(fails: Callable[[int], bool]) -> StoredPass:
        passes = iter(range(10_000))

        def evolve(frame: Any, tables: Any) -> Any:
            if fails(next(passes)) or (_PARTITION, _BAD) in frame.positions:
                raise _WorkerEnded
            return SimpleNamespace(scanned=None, targets=None)

        tables = SimpleNamespace(ingest=SimpleNamespace(name="orders"), identifiers=())
        tables.without_unknown_columns = lambda: tables
        context = SimpleNamespace(
            lake=SimpleNamespace(nessie=SimpleNamespace(reference=lambda _: SimpleNamespace(hash="0"))),
            branch="run",
            commit_properties={},
            session=lambda: SimpleNamespace(createDataFrame=lambda *_: _Frame(())),
        )
        frame = _Frame([(_PARTITION, offset) for offset in range(1_000)])
        return run_divided_pass(cast("Any", frame), cast("Any", tables), cast("Any", context), evolve)

    return run


def test_only_the_record_that_ends_its_worker_is_unwritable(
    divide: Callable[[Callable[[int], bool]], StoredPass],
) -> None:
    assert [*divide(lambda _: False).unwritable] == [(_PARTITION, _BAD)]


@pytest.mark.parametrize("first", range(1, 20))
def test_an_outage_during_the_division_makes_no_good_record_unwritable(
    divide: Callable[[Callable[[int], bool]], StoredPass], first: int
) -> None:
    """Dead letters of good records would have to be reprocessed, and `--from-raw` would remove their rows."""
    try:
        unwritable = divide(lambda number: first <= number < first + 40).unwritable
    except _WorkerEnded:
        return
    assert [*unwritable] == [(_PARTITION, _BAD)]


def test_an_outage_that_ends_before_a_record_is_alone_does_no_harm(
    divide: Callable[[Callable[[int], bool]], StoredPass],
) -> None:
    assert [*divide(lambda number: 3 <= number < 6).unwritable] == [(_PARTITION, _BAD)]
