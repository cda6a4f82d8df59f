"""Compute the error model by Spark: pairs of element sets on workers, then curves, jumps and factors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS
from branchlake_dagster.sda.shipping import map_in_arrow
from branchlake_dagster.sda.trust.arrow import (
    COMPARED_OBJECT_SCHEMA,
    FACTOR_SCHEMA,
    GROWTH_SCHEMA,
    HISTORY_INPUT,
    JUMP_SCHEMA,
    PAIR_SCHEMA,
    SET_SCHEMA,
    STATISTIC_SCHEMA,
    SWAP_INPUT_SCHEMA,
    SWAP_SCHEMA,
    BatchFunction,
    build_first_pairs,
    compare_batches,
    describe_objects,
    factor_batches,
    find_jump_batches,
    find_swap_batches,
    fit_batches,
    read_growth,
    select_latest_sets,
    summarize_batches,
)
from branchlake_dagster.sda.trust.classes import CLASSES
from branchlake_dagster.sda.trust.differences import DAY_MICROS
from branchlake_dagster.sda.trust.growth import AGE_EDGES_DAYS, AXES, MAX_SIGMA_KM
from branchlake_dagster.sda.trust.jumps import JumpKind
from branchlake_dagster.sda.trust.tables import CURVE_PARAMETERS, POSITION_AXES, UNIT_SUFFIXES

_STATISTIC_INPUT = ("class_code", "age_bin", "age_days", *(f"difference_{axis}" for axis in AXES))
_FACTOR_INPUT = ("sat_no", "class_code", "age_days", *(f"difference_{axis}" for axis in AXES))


@dataclass(frozen=True)
class ErrorModelFrames:
    """The tables of an error model as Spark frames, and the numbers of rows that led to them.

    ``element_errors``, ``object_errors`` and ``element_jumps`` have the columns of their contracts.
    ``affected`` counts the ``differences`` that were left out because of a jump. ``jumps`` are counted by
    kind.
    """

    element_errors: DataFrame
    object_errors: DataFrame
    element_jumps: DataFrame
    element_sets: int
    objects: int
    differences: int
    affected: int
    jumps: dict[str, int]


@contextmanager
def compute_error_model(history: DataFrame, days: float) -> Iterator[ErrorModelFrames]:
    """Compute the error model of the element sets whose epoch is at most ``days`` before the newest epoch.

    The first pass uses all differences to find jumps. The second pass leaves out the differences that span
    jumps. Frames are valid until the context ends, because Spark keeps intermediate rows for them.

    The driver holds the number of pairs of each object, and the curves of all classes.

    Args:
        history: Element sets with the columns `HISTORY_INPUT`.
        days: The length of the history.
    """
    with ExitStack() as stack:

        def persist(frame: DataFrame) -> DataFrame:
            stored_frame = frame.persist()
            stack.callback(stored_frame.unpersist)
            return stored_frame

        first_micros, last_micros, recent = _select_recent(history, days)
        sets = persist(_map(recent.repartition("sat_no"), select_latest_sets, SET_SCHEMA))
        # A function over batches changes no row's partition: all rows of an object stay together.
        objects = persist(_map(sets, describe_objects, COMPARED_OBJECT_SCHEMA))
        compare = compare_batches(build_first_pairs(objects.toArrow()))
        pairs = persist(_map(sets, compare, PAIR_SCHEMA))
        rough_growth = read_growth(_fit(pairs, np.inf).toArrow())
        candidates = persist(_map(pairs, find_jump_batches(rough_growth), JUMP_SCHEMA))
        swaps = _find_swaps(candidates, sets)
        jumps = persist(_add_swaps(candidates, swaps))
        quiet = _leave_out_jumps(pairs, jumps)
        growth_frame = persist(_fit(quiet, MAX_SIGMA_KM))
        growth_rows = growth_frame.toArrow()
        find_factors = factor_batches(read_growth(growth_rows))
        by_object = quiet.select(*_FACTOR_INPUT).repartition("sat_no")
        factors = persist(_add_factors(objects, _map(by_object, find_factors, FACTOR_SCHEMA)))
        set_count, sets_hash = _hash_rows(sets)
        object_count, factors_hash = _hash_rows(factors)
        hashed = f"{set_count},{sets_hash},{object_count},{factors_hash}".encode()
        model_id = F.lit(build_model_id(last_micros, hashed, growth_rows)).alias("error_model_id")
        jump_counts = jumps.groupBy("kind").count().orderBy("kind").collect()
        difference_count = pairs.count()
        yield ErrorModelFrames(
            growth_frame.select(*_error_columns(first_micros, last_micros), model_id),
            factors.select(*_object_columns(), model_id),
            jumps.select("*", model_id),
            set_count,
            object_count,
            difference_count,
            difference_count - quiet.count(),
            {str(kind): int(count) for kind, count in jump_counts},
        )


def build_model_id(newest_micros: int, hashed_rows: bytes, growth: pa.Table) -> str:
    """Build a model's id from the newest epoch of its history, and a hash of the history and the model.

    Args:
        newest_micros: The newest epoch, UTC microseconds.
        hashed_rows: Hashes of the element sets and of the objects' factors.
        growth: The curves, `GROWTH_SCHEMA`.
    """
    digest = sha256(hashed_rows)
    for row in growth.sort_by([("class_code", "ascending"), ("age_bin", "ascending")]).to_pylist():
        digest.update(repr(row).encode())
    newest = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=newest_micros)
    return f"{newest:%Y%m%dT%H%M%SZ}-{digest.hexdigest()[:16]}"


def _map(frame: DataFrame, function: BatchFunction, schema: pa.Schema) -> DataFrame:
    return map_in_arrow(frame, function, schema)


def _select_recent(history: DataFrame, days: float) -> tuple[int, int, DataFrame]:
    """Return the oldest and the newest epoch of the last ``days`` (UTC microseconds), and their sets."""
    epoch = F.col("epoch")
    (newest,) = history.agg(F.unix_micros(F.max(epoch))).head() or (None,)
    if newest is None:
        return 0, 0, history.select(*HISTORY_INPUT)
    oldest = int(newest) - round(days * DAY_MICROS)
    recent = history.select(*HISTORY_INPUT).where(epoch >= F.timestamp_micros(F.lit(oldest)))
    (first,) = recent.agg(F.unix_micros(F.min(epoch))).head() or (newest,)
    return int(first), int(newest), recent


def _fit(pairs: DataFrame, max_sigma_km: float) -> DataFrame:
    """Fit curves of the error against age (`GROWTH_SCHEMA`) to pairs of element sets.

    A curve ends before the age at which the error along the track exceeds `max_sigma_km`. All pairs of an age
    bin are summarized by one task, and one task fits all curves.
    """
    statistics = _map(
        pairs.select(*_STATISTIC_INPUT).repartition("age_bin"), summarize_batches, STATISTIC_SCHEMA
    )
    return _map(statistics.repartition(1), fit_batches(max_sigma_km), GROWTH_SCHEMA)


def _find_swaps(candidates: DataFrame, sets: DataFrame) -> DataFrame:
    """Find the swaps among the jumps `candidates` (`SWAP_SCHEMA`). `sets` are the element sets.

    One task finds all swaps, because the two objects of a swap can be any two objects.
    """
    found = F.broadcast(candidates.select("sat_no", "older_epoch", "newer_epoch"))
    for side in ("older", "newer"):
        renamed = sets.select(
            "sat_no",
            F.col("epoch").alias(f"{side}_epoch"),
            *(F.col(name).alias(f"{side}_{name}") for name in ELEMENT_FIELDS),
        )
        found = renamed.join(F.broadcast(found), ["sat_no", f"{side}_epoch"])
    in_one_partition = found.select(*SWAP_INPUT_SCHEMA.names).repartition(1)
    return _map(in_one_partition, find_swap_batches, SWAP_SCHEMA)


def _add_swaps(candidates: DataFrame, swaps: DataFrame) -> DataFrame:
    """Return the jumps `candidates` with the columns of `ElementJump` except the model's id.

    A jump that is in `swaps` gets the kind `swap`.
    """
    is_swap = F.col("taken_for").isNotNull()
    joined = candidates.join(F.broadcast(swaps), ["sat_no", "newer_epoch"], "left")
    return joined.select(
        "sat_no",
        F.col("newer_epoch").alias("epoch"),
        F.col("older_epoch").alias("previous_epoch"),
        F.when(is_swap, F.lit(JumpKind.SWAP.value)).otherwise(F.col("kind")).alias("kind"),
        "reason",
        "sigmas",
        (-F.col("difference_a")).alias("semi_major_axis_change_km"),
        (-F.col("difference_i")).alias("inclination_change_deg"),
        F.col("difference_t").alias("in_track_km"),
        "taken_for",
    )


def _leave_out_jumps(pairs: DataFrame, jumps: DataFrame) -> DataFrame:
    """Leave out pairs that span a jump, and those whose older set is a lone set.

    If the newer set is a lone set, the pair spans its jump. A swapped set is not a lone set.
    """
    jump = F.broadcast(jumps.select("sat_no", "epoch", "kind")).alias("jump")
    older, newer, epoch = F.col("pair.older_epoch"), F.col("pair.newer_epoch"), F.col("jump.epoch")
    is_across = (epoch > older) & (epoch <= newer)
    is_of_lone_set = (F.col("jump.kind") == JumpKind.LONE_SET.value) & (epoch == older)
    is_same_object = F.col("pair.sat_no") == F.col("jump.sat_no")
    return pairs.alias("pair").join(jump, is_same_object & (is_across | is_of_lone_set), "left_anti")


def _add_factors(objects: DataFrame, factors: DataFrame) -> DataFrame:
    """Return objects with their factors (`FACTOR_SCHEMA`). An object without differences has the factor 1."""
    joined = objects.select("sat_no", "class_code").join(factors, "sat_no", "left")
    return joined.select(
        "sat_no",
        "class_code",
        F.coalesce("samples", F.lit(0)).alias("samples"),
        *(F.coalesce(f"factor_{axis}", F.lit(1.0)).alias(f"factor_{axis}") for axis in AXES),
    )


def _hash_rows(frame: DataFrame) -> tuple[int, int]:
    """Return the number of rows, and a hash of them that does not depend on their order."""
    row = frame.agg(F.count("*"), F.bit_xor(F.xxhash64(*frame.columns))).head()
    count, hashed = row if row is not None else (0, None)
    return int(count), int(hashed or 0)


def _class_name(code: Column) -> Column:
    """Return the name of a class by its index in `CLASSES`, or null for -1."""
    names = F.array(*(F.lit(name.value) for name in CLASSES))
    return F.when(code >= 0, F.get(names, code.cast("int")))


def _item(values: Sequence[float], index: Column) -> Column:
    return F.get(F.array(*(F.lit(value) for value in values)), index.cast("int"))


def _nullable(value: Column) -> Column:
    """Return null instead of NaN."""
    return F.when(~F.isnan(value), value)


def _error_columns(first_micros: int, last_micros: int) -> Iterator[Column]:
    """Return the columns of `ElementError` from `GROWTH_SCHEMA`, except the model's id."""
    age_bin = F.col("age_bin")
    yield _class_name(F.col("class_code")).alias("orbit_class")
    yield _item(AGE_EDGES_DAYS, age_bin).alias("from_age_days")
    yield _item(AGE_EDGES_DAYS, age_bin + 1).alias("to_age_days")
    yield F.col("samples")
    yield _nullable(F.col("age_days")).alias("age_days")
    for name in ("sigma", "p95", "median", "fitted"):
        for k, axis in enumerate(POSITION_AXES):
            yield _nullable(F.get(name, k)).alias(f"{name}_{axis}_km")
    for name in CURVE_PARAMETERS:
        for k, axis in enumerate(POSITION_AXES):
            yield _nullable(F.get(name, k)).alias(f"{name}_{axis}{UNIT_SUFFIXES[name]}")
    yield _class_name(F.col("source_code")).alias("curve_of")
    yield F.col("until_days").alias("until_age_days")
    for name, micros in (("history_from", first_micros), ("history_until", last_micros)):
        yield F.timestamp_micros(F.lit(micros)).alias(name)


def _object_columns() -> Iterator[Column]:
    """Return the columns of `ObjectError`, except the model's id."""
    yield F.col("sat_no")
    yield _class_name(F.col("class_code")).alias("orbit_class")
    yield F.col("samples")
    for axis in POSITION_AXES:
        yield F.col(f"factor_{axis}")
