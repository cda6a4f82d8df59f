"""A check that two tables of the registry agree. It runs in Python without Spark, on a few columns."""

# No `from __future__ import annotations`: Dagster reads the annotations of the check.
import dagster as dg
import polars as pl

from branchlake_dagster import LakehouseResource
from branchlake_dagster.sda.assets.catalogue import CATALOGUE
from branchlake_dagster.sda.assets.registry import OBJECTS

_SHOWN = 5


@dg.asset_check(
    asset=OBJECTS,
    additional_deps=[CATALOGUE],
    description="Tracked objects have an element set, and both tables have the same state of each object.",
    metadata={"branchlake/scope": "table"},
)
def tracked_have_elements(lakehouse: LakehouseResource) -> dg.AssetCheckResult:
    """Check that `objects` and `catalogue` on the run's branch agree on each object.

    The check fails if the states of an object differ, if only `catalogue` has the object, or if only
    `objects` has it and it has elements or the state `tracked`. All rows are compared.
    """
    catalog = lakehouse.catalog()
    objects, catalogue = (
        pl.DataFrame(
            pl.from_arrow(catalog.load_table(tuple(key.path)).scan(selected_fields=columns).to_arrow())
        )
        for key, columns in ((OBJECTS, ("sat_no", "state", "epoch")), (CATALOGUE, ("sat_no", "state")))
    )
    bad = find_disagreements(objects, catalogue)
    return dg.AssetCheckResult(
        passed=bad.is_empty(),
        metadata={
            "failing_rows": bad.height,
            "total_rows": objects.height,
            "examples": dg.MetadataValue.json(bad.head(_SHOWN).to_dicts()),
        },
    )


def find_disagreements(objects: pl.DataFrame, catalogue: pl.DataFrame) -> pl.DataFrame:
    """Return the objects about which the two tables disagree.

    An object disagrees if the states differ, if only `catalogue` has it, or if it has elements or the state
    `tracked` without a row in `catalogue`.

    Args:
        objects: The columns ``sat_no``, ``state`` and ``epoch``.
        catalogue: The columns ``sat_no`` and ``state``.

    Returns:
        ``sat_no``, ``state`` and ``state_in_catalogue`` of each such object.
    """
    sides = (
        objects.with_columns(known=pl.lit(value=True)),
        catalogue.select("sat_no", state_in_catalogue="state", listed=pl.lit(value=True)),
    )
    both = sides[0].join(sides[1], on="sat_no", how="full", coalesce=True)
    unlisted = pl.col("listed").is_null()
    bad = (
        pl.col("known").is_null()
        | (unlisted & pl.col("epoch").is_not_null())
        | (pl.col("state_in_catalogue") != pl.col("state"))
        | (unlisted & (pl.col("state") == "tracked"))
    )
    return both.filter(bad).select("sat_no", "state", "state_in_catalogue").sort("sat_no")
