"""Random histories of real tables, written by PyIceberg and by Spark: the change between any two states.

`BRANCHLAKE_TEST_REAL_SEED` sets the seed with which they begin.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from pyiceberg.table import Table
from pyspark.sql import SparkSession

from branchlake_dagster.history.capture import capture_change, current_position
from branchlake_dagster.history.change import Position, RowsUnreadable
from branchlake_dagster.history.ranges import changed_ranges
from branchlake_dagster.history.rows import RowReader, drop_unchanged_rows
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.history.snapshot_tables import counted, difference
from branchlake_dagster_tests.publication.rebase.deleting import delete_equal
from branchlake_dagster_tests.suite import soak
from branchlake_dagster_tests.suite.raised import raising

FIRST_SEED = int(os.environ.get("BRANCHLAKE_TEST_REAL_SEED", "0"))
STEPS = 6

pytestmark = pytest.mark.spark

_ON_READ = {
    f"write.{one}.{what}": value
    for one in ("delete", "update", "merge")
    for what, value in (("mode", "merge-on-read"), ("distribution-mode", "none"))
}
WRITERS = {
    "one delete file for each data file": {**_ON_READ, "format-version": "2"},
    "one delete file for a partition": {
        **_ON_READ,
        "format-version": "2",
        "write.delete.granularity": "partition",
    },
    "deletion vectors": {**_ON_READ, "format-version": "3"},
    "copy-on-write": {"format-version": "2"},
}
_FIRST = {"deletion vectors": 3, "copy-on-write": 3}
"""Where a writer's histories begin after the seed: earlier ones have few kinds of statements."""
STATEMENTS = (
    "INSERT INTO {t} VALUES {rows}",
    "INSERT INTO {t} VALUES {rows}",
    "DELETE FROM {t} WHERE id % 5 = {n}",
    "DELETE FROM {t} WHERE id % 3 = {m}",
    "UPDATE {t} SET value = value + 1 WHERE id % 4 = {n}",
    "MERGE INTO {t} USING (SELECT {n}L AS id) s ON {t}.id = s.id"
    " WHEN MATCHED THEN UPDATE SET value = 50 WHEN NOT MATCHED THEN INSERT (day, id, value) VALUES ('c', {n}, 0)",
    "INSERT OVERWRITE {t} VALUES ('a', {n}, 7)",
    "CALL nessie.system.rewrite_data_files(table => '{name}', options => map('rewrite-all', 'true'))",
    "CALL nessie.system.rewrite_position_delete_files(table => '{name}', options => map('rewrite-all', 'true'))",
)
Found = Counter[tuple[Any, ...]]


@pytest.fixture(scope="module")
def session(lakehouse: Lakehouse) -> Iterator[SparkSession]:
    found = lakehouse.spark_session()
    found.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    found.conf.set("spark.sql.shuffle.partitions", "1")
    yield found
    found.stop()


def play(session: SparkSession, namespace: str, name: str, how: dict[str, str], random: Random) -> list[str]:
    """A table with a history of its own; what was done to it."""
    told = ", ".join(f"'{key}'='{value}'" for key, value in how.items())
    table = f"nessie.{namespace}.{name}"
    session.sql(
        f"CREATE TABLE {table} (day STRING, id BIGINT, value BIGINT) USING iceberg PARTITIONED BY (day)"
        f" TBLPROPERTIES ({told})"
    )
    done = [STATEMENTS[0], *random.choices(STATEMENTS, k=STEPS)]
    for number, statement in enumerate(done):
        rows = ", ".join(
            f"('{random.choice('ab')}', {random.randrange(10)}, {random.randrange(3)})"
            for _ in range(6 if number == 0 else 3)
        )
        done[number] = statement.format(
            t=table, name=f"{namespace}.{name}", rows=rows, n=random.randrange(4), m=random.randrange(3)
        )
        session.sql(done[number]).collect()
    return done


def at(table: Table, snapshot_id: int | None) -> Table:
    """The table as it was when this was its current snapshot."""
    metadata = table.metadata.model_copy(update={"current_snapshot_id": snapshot_id})
    return Table(table.name(), metadata, table.metadata_location, table.io, table.catalog)


def require_every_change(table: Table) -> int:
    """Between any two states the change is their difference, and its ranges hold all its rows."""
    ids = [snapshot.snapshot_id for snapshot in table.metadata.snapshots]
    states: dict[int | None, Found] = {one: counted(table.scan(snapshot_id=one).to_arrow()) for one in ids}
    uuid = str(table.metadata.table_uuid)
    for end, upto in enumerate(ids):
        now = at(table, upto)
        for before in (None, *ids[:end]):
            change = capture_change(now, Position(uuid, before), name="t")
            found = RowReader(now, change).read()
            expected = Counter(states[upto])
            expected.subtract(states.get(before, Counter()))
            wanted = Counter({row: count for row, count in expected.items() if count})
            assert difference(found) == wanted, (before, upto, change.label())
            net = drop_unchanged_rows(found)
            assert counted(net.added) == +wanted
            assert counted(net.removed) == -wanted
            for place, field in enumerate(("day", "id")):
                ranges = changed_ranges(change, field, now.metadata)
                assert all(
                    ranges.anything or any(part.low <= row[place] <= part.high for part in ranges.parts)
                    for row in wanted
                )
    return len(ids)


@pytest.mark.parametrize("how", WRITERS)
def test_what_spark_changes_between_any_two_states(
    lakehouse: Lakehouse, session: SparkSession, namespace: str, how: str
) -> None:
    session.sql(f"CREATE NAMESPACE nessie.{namespace}")
    for number in range(3 if os.environ.get(soak.VARIABLE) else 1):
        seed = FIRST_SEED + _FIRST.get(how, 0) + number
        name = f"t{number}"
        done = play(session, namespace, name, WRITERS[how], Random(f"{how} {seed}"))
        table = lakehouse.catalog().load_table((namespace, name))
        try:
            require_every_change(table)
            spark = Counter(tuple(row) for row in session.table(f"nessie.{namespace}.{name}").collect())
            assert counted(table.scan().to_arrow()) == spark
        except Exception as error:
            error.add_note(f"seed {seed}, {how}:\n" + "\n".join(done))
            raise


def test_rows_deleted_by_value_are_not_reported_one_by_one(
    lakehouse: Lakehouse, session: SparkSession, namespace: str
) -> None:
    session.sql(f"CREATE NAMESPACE nessie.{namespace}")
    session.sql(
        f"CREATE TABLE nessie.{namespace}.t (day STRING, id BIGINT) USING iceberg PARTITIONED BY (day)"
        " TBLPROPERTIES ('format-version'='2')"
    )
    session.sql(f"INSERT INTO nessie.{namespace}.t VALUES ('a', 1), ('a', 2), ('b', 2), ('b', 3)")
    table = lakehouse.catalog().load_table((namespace, "t"))
    start = current_position(table)
    delete_equal(table, "id", 2, "a")
    middle = current_position(table)
    change = capture_change(table, start, name="t")
    assert not change.only_appends
    with raising(RowsUnreadable, table="t"):
        RowReader(table, change)
    days = changed_ranges(change, "day", table.metadata)
    assert [(part.low, part.high) for part in days.parts] == [("a", "a")]
    assert changed_ranges(change, "id", table.metadata).anything
    # Nor what was left of a file that goes later; additions alone are told.
    session.sql(f"DELETE FROM nessie.{namespace}.t WHERE day = 'a'")
    table.refresh()
    with raising(RowsUnreadable, table="t"):
        RowReader(table, capture_change(table, middle, name="t")).read()
    late = current_position(table)
    session.sql(f"INSERT INTO nessie.{namespace}.t VALUES ('b', 4)")
    table.refresh()
    assert difference(RowReader(table, capture_change(table, late, name="t")).read()) == Counter([("b", 4)])
