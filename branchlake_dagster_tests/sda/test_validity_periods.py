"""Validity periods that Spark's workers compute are those of the rule on all entries at once."""

from __future__ import annotations

import random
from datetime import date, timedelta

import polars as pl
import pytest
from pyspark.sql import DataFrame

from branchlake_dagster.sda.assets.registry import satellites
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH
from branchlake_dagster.sda.registry.periods import DATED_ENTRY_COLUMNS, PERIOD_COLUMNS
from branchlake_dagster.sda.registry.satcat import build_validity_periods

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

SEED = 20261126


@pytest.fixture(scope="module")
def session(lakehouse):
    made = lakehouse.spark_session()
    yield made
    made.stop()


def random_entries(chance: random.Random, number: int) -> pl.DataFrame:
    rows = [
        {
            **dict.fromkeys(DATED_ENTRY_COLUMNS),
            "snapshot_id": f"satcat-{number}",
            "sat_no": sat_no,
            "object_name": chance.choice((None, "A", "B")),
            "owner": chance.choice((None, "US", "UK")),
            "decay_date": chance.choice((None, None, date(2026, 8, 6))),
            "rcs_m2": chance.choice((None, 0.5)),
            "apogee_km": chance.uniform(300, 900),
            "collected_at": REFERENCE_EPOCH + timedelta(hours=chance.randrange(12)),
        }
        for sat_no in range(1, 300)
        if chance.random() < 0.3
    ]
    return pl.DataFrame(rows, schema=DATED_ENTRY_COLUMNS)


def compute(session, entries: pl.DataFrame, path) -> tuple[DataFrame, pl.DataFrame]:
    entries.write_parquet(path)
    # Several partitions, so that the entries of an object come from different ones.
    frame = satellites(session.read.parquet(str(path)).repartition(3, "snapshot_id"))
    return frame, pl.DataFrame(pl.from_arrow(frame.toArrow())).sort("sat_no", "valid_from")


def test_periods_by_workers_are_those_of_all_entries_at_once(session, tmp_path):
    chance = random.Random(SEED)
    entries = pl.concat([random_entries(chance, number) for number in range(8)])
    frame, periods = compute(session, entries, tmp_path / "entries.parquet")
    expected = build_validity_periods(entries).select(*PERIOD_COLUMNS).sort("sat_no", "valid_from")
    assert expected.height > expected["sat_no"].n_unique(), "some objects have several periods"
    assert frame.columns == list(PERIOD_COLUMNS)
    assert periods.equals(expected), f"seed {SEED}"


def test_columns_that_an_earlier_table_lacks_are_null(session, tmp_path):
    entries = random_entries(random.Random(SEED), 1).with_columns(rcs_m2=pl.lit(None, pl.Float64))
    _, periods = compute(session, entries.drop("rcs_m2"), tmp_path / "entries.parquet")
    expected = build_validity_periods(entries).select(*PERIOD_COLUMNS).sort("sat_no", "valid_from")
    assert periods.equals(expected)
    assert periods["rcs_m2"].null_count() == periods.height > 0


def test_no_entries_give_no_periods(session, tmp_path):
    _, periods = compute(session, pl.DataFrame(schema=DATED_ENTRY_COLUMNS), tmp_path / "entries.parquet")
    assert periods.height == 0
    assert periods.columns == list(PERIOD_COLUMNS)
