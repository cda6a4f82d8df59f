"""The error model that Spark computes is that of the whole history at once, however the rows are divided."""

from dataclasses import replace
from datetime import timedelta

import numpy as np
import polars as pl
import pytest

from branchlake_dagster.sda.benchmarks.whole_history_model import build_error_model
from branchlake_dagster.sda.contracts import ElementError, ElementJump, ObjectError
from branchlake_dagster.sda.gp.read import read_catalogue
from branchlake_dagster.sda.gp.simulated import REFERENCE_EPOCH
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.sources import snapshot_id, snapshot_time
from branchlake_dagster.sda.trust.arrow import HISTORY_INPUT
from branchlake_dagster.sda.trust.distributed import _hash_rows, compute_error_model
from branchlake_dagster.sda.trust.jumps import JumpKind
from branchlake_dagster_tests.sda.test_contracts import in_order, stored, types
from branchlake_dagster_tests.sda.test_screening import SNAPSHOTS
from branchlake_dagster_tests.sda.test_trust import changed, history, manoeuvred, orbits
from branchlake_dagster_tests.sda.whole_history_tables import element_errors, element_jumps, object_errors

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

DAYS = 75.0
CONTRACTS = (ElementError, ObjectError, ElementJump)


def rows_of(part: Elements, hour: int, snapshot: str) -> pl.DataFrame:
    """Element sets as rows of the history, collected in one hour."""
    return pl.DataFrame(part.values, schema=list(ELEMENT_FIELDS)).select(
        pl.Series("sat_no", part.sat_no),
        pl.Series("epoch", part.epoch_micros).cast(pl.Datetime("us", "UTC")),
        *ELEMENT_FIELDS,
        pl.lit(REFERENCE_EPOCH + timedelta(hours=hour)).alias("collected_at"),
        pl.lit(snapshot).alias("snapshot_id"),
    )


def jumpy_history() -> pl.DataFrame:
    """A maneuver, a lone set, an unconfirmed jump, a swap, corrected sets, an old set, and an object alone."""
    parts = manoeuvred(history(120, 10, 1.0, 0.01), 6, 5, -0.01)
    parts[4] = changed(parts[4], 30, inclination=0.5)
    parts[9] = changed(parts[9], 40, mean_motion=0.02)
    for k in range(5, 10):
        values = parts[k].values.copy()
        values[[7, 8]] = values[[8, 7]]
        parts[k] = replace(parts[k], values=values)
    frames = [rows_of(part, k, f"sim-{k}") for k, part in enumerate(parts)]
    # Of one epoch the set that was collected last counts, and of one collection that of the last snapshot.
    wrong = changed(parts[3], 11, inclination=3.0)
    frames += [rows_of(wrong, 2, "sim-wrong"), rows_of(parts[3], 3, "sim-again")]
    alone, old = (orbits(1, seed=9).take(np.array([0])) for _ in range(2))
    frames.append(rows_of(replace(alone, sat_no=np.array([999])), 0, "sim-0"))
    before = old.epoch_micros - round((DAYS + 1) * 86_400e6)
    frames.append(rows_of(replace(old, sat_no=np.array([888]), epoch_micros=before), 0, "sim-0"))
    return pl.concat(frames)


def compared_sets(rows: pl.DataFrame) -> Elements:
    """The sets of the last days, sorted: of several with one epoch the one that was collected last."""
    recent = rows.filter(pl.col("epoch") >= pl.col("epoch").max() - timedelta(days=DAYS))
    latest = recent.sort("sat_no", "epoch", "collected_at", "snapshot_id").unique(
        ["sat_no", "epoch"], keep="last", maintain_order=True
    )
    return Elements.from_arrow(latest.to_arrow())


def compute(session, path, rows: pl.DataFrame, partitions: int):
    """The three tables, sorted, without the model's id; the id; and the counts by name."""
    rows.select(HISTORY_INPUT).write_parquet(path)
    source = session.read.parquet(str(path)).repartition(partitions, "snapshot_id", "sat_no")
    with compute_error_model(source, DAYS) as model:
        frames = [
            pl.DataFrame(pl.from_arrow(frame.toArrow()))
            for frame in (model.element_errors, model.object_errors, model.element_jumps)
        ]
        counts = (model.element_sets, model.objects, model.differences, model.affected, model.jumps)
    ids = set(pl.concat([frame["error_model_id"] for frame in frames]))
    (model_id,) = ids
    keys = (["orbit_class", "from_age_days"], ["sat_no"], ["sat_no", "epoch"])
    tables = [
        frame.drop("error_model_id").sort(by).with_columns(pl.col(pl.Datetime).cast(pl.Datetime("us", "UTC")))
        for frame, by in zip(frames, keys, strict=True)
    ]
    return tables, model_id, counts


def expected_tables(sets: Elements) -> tuple[list[pl.DataFrame], tuple[int, int, int, int]]:
    model = build_error_model(sets)
    tables = [
        element_errors(model, sets).sort("orbit_class", "from_age_days"),
        object_errors(model).sort("sat_no"),
        element_jumps(model, sets).sort("sat_no", "epoch"),
    ]
    return tables, (len(sets), len(model.sat_no), len(model.differences), int(model.is_affected.sum()))


def test_the_tables_are_those_of_the_whole_history_and_each_model_has_its_own_id(spark_session, tmp_path):
    rows = jumpy_history()
    sets = compared_sets(rows)
    expected, expected_counts = expected_tables(sets)
    tables, model_id, counts = compute(spark_session, tmp_path / "a.parquet", rows, 3)
    for table, wanted in zip(tables, expected, strict=True):
        assert table.equals(wanted.select(table.columns))
    assert counts[:4] == expected_counts
    kinds = expected[2].group_by("kind").len()
    assert counts[4] == dict(kinds.iter_rows())
    assert set(counts[4]) == {one.value for one in JumpKind}, "each kind of jump is compared"
    assert {888, 999} & set(tables[1]["sat_no"]) == {999}
    # In another order and in other partitions, and with another value of a set that is in no pair.
    other_rows = rows.reverse().with_columns(
        pl.when(pl.col("sat_no") == 999).then(pl.col("bstar") + 1e-9).otherwise("bstar").alias("bstar")
    )
    same, other_id, _ = compute(spark_session, tmp_path / "b.parquet", other_rows, 1)
    assert all(one.equals(other) for one, other in zip(same, tables, strict=True))
    assert other_id != model_id
    assert other_id.split("-")[0] == model_id.split("-")[0] == f"{rows['epoch'].max():%Y%m%dT%H%M%SZ}"


def test_no_history_gives_a_model_without_curves_and_the_columns_of_the_contracts(spark_session, tmp_path):
    rows = jumpy_history().clear()
    tables, model_id, counts = compute(spark_session, tmp_path / "none.parquet", rows, 3)
    assert counts == (0, 0, 0, 0, {})
    assert tables[0].height == 99
    assert tables[0]["curve_of"].null_count() == 99
    assert tables[0]["samples"].sum() == 0
    assert model_id.startswith("19700101T000000Z-")
    assert tables[1].height == tables[2].height == 0
    for table, contract in zip(tables, CONTRACTS, strict=True):
        told = table.with_columns(error_model_id=pl.lit(model_id)).to_arrow().schema
        assert in_order(types(contract)) == in_order(stored(told))


def test_the_hash_of_rows_does_not_depend_on_their_order(spark_session):
    rows = spark_session.range(1_000)
    hashed = _hash_rows(rows)
    assert _hash_rows(rows.orderBy(rows.id.desc()).repartition(3)) == hashed
    assert _hash_rows(spark_session.range(1, 1_001)) != hashed


# In `make test`, a made history shows that Spark's tables are those of the function, and test_trust.py has real history.
@pytest.mark.soak
@pytest.mark.long
@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason=f"no real snapshots in {SNAPSHOTS}")
def test_the_tables_of_real_history_are_those_of_the_whole_history_at_once(spark_session, tmp_path):
    frames = []
    for path in sorted(SNAPSHOTS.glob("active-*.tle.gz")):
        name = snapshot_id(path)
        found = read_catalogue(path.read_bytes(), path.name).elements.filter(pl.col("sat_no") % 4 == 0)
        frames.append(found.with_columns(snapshot_id=pl.lit(name), collected_at=pl.lit(snapshot_time(name))))
    rows = pl.concat(frames)
    expected, expected_counts = expected_tables(compared_sets(rows))
    tables, model_id, counts = compute(spark_session, tmp_path / "real.parquet", rows, 2)
    assert counts[:4] == expected_counts
    for table, wanted in zip(tables, expected, strict=True):
        assert table.equals(wanted.select(table.columns))
    assert tables[2].height > 1_000
    _, same_id, _ = compute(spark_session, tmp_path / "reversed.parquet", rows.reverse(), 1)
    assert same_id == model_id
