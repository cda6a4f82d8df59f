"""Spark reads and writes a table whose snapshots expired."""

from __future__ import annotations

import pytest

from branchlake_dagster.expiry.retention import MIN_SNAPSHOTS_PROPERTY, KeptBy
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.expiry.test_snapshot_expiry import appended, expired, ids, planned, seeded
from branchlake_dagster_tests.publication.workbench import Workbench


@pytest.mark.spark
def test_spark_goes_on_after_an_expiry(lakehouse: Lakehouse, namespace: str) -> None:
    bench = Workbench(lakehouse, namespace)
    seeded(bench, 5)
    # Spark's delete files cannot be replayed: this run is published as it left the table.
    run = bench.run()
    properties = "'write.delete.mode'='merge-on-read'"
    run.sql(f"ALTER TABLE {{t}} SET TBLPROPERTIES ({properties})", "DELETE FROM {t} WHERE id = 0")
    assert expired(bench).expired_count > 0
    bench.published(run)
    assert bench.rows() == [("a", number) for number in range(1, 5)]
    nessie = lakehouse.nessie
    nessie.delete_branch(run.name, expected_hash=nessie.reference(run.name).hash)
    assert expired(bench).kept_count == 2
    before = ids(bench)
    session = lakehouse.spark_session("main")
    try:
        name = f"nessie.{namespace}.t"
        assert sorted(row.id for row in session.table(name).collect()) == [1, 2, 3, 4]
        history = session.sql(f"SELECT snapshot_id FROM {name}.snapshots").collect()
        assert {row.snapshot_id for row in history} == set(before)
        session.sql(f"INSERT INTO {name} VALUES ('b', 9)")
        assert session.table(name).count() == 5
    finally:
        session.stop()
    assert ids(bench)[:2] == before
    appended(bench, 10)
    assert len(bench.rows()) == 6
    bench.clean()


@pytest.mark.spark
def test_retention_that_spark_sets_on_the_table_counts(lakehouse: Lakehouse, namespace: str) -> None:
    bench = Workbench(lakehouse, namespace)
    before = seeded(bench, 6)
    bench.sql(
        f"ALTER TABLE {{t}} REPLACE BRANCH main AS OF VERSION {before[-1]} WITH SNAPSHOT RETENTION 4 SNAPSHOTS"
    )
    (table,) = planned(bench).tables
    assert (table.oldest_id, table.kept_by, table.holder) == (before[2], KeptBy.RETENTION, "main")
    bench.sql("ALTER TABLE {t} CREATE BRANCH audit WITH SNAPSHOT RETENTION 5 SNAPSHOTS")
    (table,) = planned(bench).tables
    assert (table.oldest_id, table.holder) == (before[1], "audit")
    bench.sql(f"ALTER TABLE {{t}} SET TBLPROPERTIES ('{MIN_SNAPSHOTS_PROPERTY}'='6')")
    assert expired(bench).expired_count == 0
    (table,) = planned(bench).tables
    assert (table.kept_by, table.holder) == (KeptBy.RETENTION, "")
    bench.clean()
