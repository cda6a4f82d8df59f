"""What metadata proves is true of every row: on random tables, against all of their rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import Table
from pyiceberg.types import NestedField

from branchlake_dagster.checks import stored_rows as stored_module
from branchlake_dagster.checks.constraints import RowConstraint, UniqueConstraint
from branchlake_dagster.checks.stored_rows import TableRows
from branchlake_dagster.history.manifests import ColumnFacts, column_facts
from branchlake_dagster.io_manager.loading import StoredRows
from branchlake_dagster.tables.selection import Selection, TimeRange, Values, to_iceberg_filter
from branchlake_dagster_tests.checks.proof.tables import NOON, catalog, keeps, random_promises, random_table
from branchlake_dagster_tests.internals.plain_pyiceberg import plain_pyiceberg

SELECTIONS = [
    None,
    None,
    Selection(((Values("p", ("a",)),),)),
    Selection(((TimeRange("at", NOON.replace(hour=0), NOON.replace(hour=23)),),)),
    Selection(()),
]


def _no_spark() -> Any:
    raise AssertionError("Spark was asked for")


class RandomTables:
    """The random tables, each written once: the tests only read them, and writing is what takes long."""

    def __init__(self, made: SqlCatalog) -> None:
        self._made = made
        self._known: dict[int, tuple[Table, Any]] = {}

    def table(self, seed: int) -> tuple[Table, random.Random]:
        """The table of this seed, and chance as it was when the table had been written."""
        rng = random.Random(f"table {seed}")
        if seed not in self._known:
            # Files of other processes have bounds that leave row groups out.
            with nullcontext() if seed % 2 else plain_pyiceberg():
                self._known[seed] = random_table(self._made, rng, f"t{seed}"), rng.getstate()
        table, state = self._known[seed]
        rng.setstate(state)
        return table, rng


def found_wrong(made: RandomTables, seed: int) -> tuple[list[str], Counter[str]]:
    """What is proved of a random table and not true of a row, and how often each kind was proved."""
    table, rng = made.table(seed)
    wrong: list[str] = []
    proved: Counter[str] = Counter()
    for selection in rng.sample(SELECTIONS, 2):
        rows = TableRows(StoredRows(table, selection, "main", _no_spark), table.schema().column_names)
        row_filter: BooleanExpression = (
            AlwaysTrue() if selection is None else to_iceberg_filter(selection, table.schema())
        )
        truth = table.scan(row_filter=row_filter).to_arrow()
        for column in table.schema().column_names:
            values = truth.column(column).to_pylist()
            for promise in random_promises(rng, column):
                constraint = RowConstraint(
                    name="r",
                    columns=(column,),
                    description="",
                    build_condition=lambda _: None,
                    promise=promise,
                )
                outcome = rows.prove(constraint)
                proved["asked"] += 1
                if outcome is None:
                    continue
                assert outcome.proof is not None
                by_metadata = outcome.proof.source == "metadata"
                proved[type(promise).__name__] += bool(values) and by_metadata
                proved[f"{type(promise).__name__} by rows"] += bool(values) and not by_metadata
                bad = [value for value in values if not keeps(promise, value)]
                if bad or not outcome.passed or outcome.total not in (None, len(values)):
                    wrong.append(f"seed {seed}: {column} {promise} {outcome}: {str(bad[:3])[:100]}")
                proved["with a total"] += bool(values) and by_metadata and outcome.total is not None
        key = rows.prove(UniqueConstraint(name="u", columns=("day", "m", "s"), description=""))
        proved["unique"] += key is not None and len(truth) > 1
        keys = {tuple(row[name] for name in ("day", "m", "s")) for row in truth.to_pylist()}
        if key is not None and len(keys) < len(truth):
            wrong.append(f"seed {seed}: unique")
    return wrong, proved


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RandomTables:
    return RandomTables(catalog(tmp_path_factory.mktemp("tables")))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("few_rows", [stored_module.SMALL_ROWS, 0], ids=["whole rows", "column by column"])
def test_what_is_proved_is_true(made: RandomTables, monkeypatch: pytest.MonkeyPatch, few_rows: int) -> None:
    monkeypatch.setattr(stored_module, "SMALL_ROWS", few_rows)
    proved: Counter[str] = Counter()
    for seed in range(16):
        wrong, found = found_wrong(made, seed)
        assert not wrong
        proved += found
    kinds = ("NotNull", "Compared", "Both", "Among", "NotAmong", "StartsWith", "EndsWith", "Length")
    assert all(proved[kind] >= 5 for kind in kinds), proved
    assert all(proved[f"{kind} by rows"] >= 5 for kind in kinds[1:]), proved
    assert proved["unique"] > 0
    assert proved["with a total"] > 50


def _without_nan(file: DataFile, field: NestedField, spec: PartitionSpec, *_: Any) -> ColumnFacts:
    return replace(column_facts(file, field, spec), no_nan=True)


def _missing_is_none(file: DataFile, field: NestedField, spec: PartitionSpec, *_: Any) -> ColumnFacts:
    nulls = (file.null_value_counts or {}).get(field.field_id, 0)
    return replace(column_facts(file, field, spec), no_null=nulls == 0)


def _whole_bounds(file: DataFile, field: NestedField, spec: PartitionSpec, *_: Any) -> ColumnFacts:
    return column_facts(file, field, spec, lambda *_: True)


@pytest.mark.long
@pytest.mark.parametrize("planted", [_without_nan, _missing_is_none, _whole_bounds])
@pytest.mark.filterwarnings("ignore")
def test_the_property_finds_what_is_easily_forgotten(
    made: RandomTables, monkeypatch: pytest.MonkeyPatch, planted: Callable[..., ColumnFacts]
) -> None:
    """NaN outside of the bounds, counts that are missing, row groups without bounds."""
    monkeypatch.setattr(stored_module, "column_facts", planted)
    assert any(found_wrong(made, seed)[0] for seed in range(40))
