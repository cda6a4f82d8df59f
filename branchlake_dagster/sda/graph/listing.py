"""Checks of the list of close approaches. They run in Python without Spark, on a few columns."""

# No `from __future__ import annotations`: Dagster reads the annotations of the checks.
from collections.abc import Iterator

import dagster as dg
import polars as pl

from branchlake_dagster import LakehouseResource
from branchlake_dagster.sda.assets.catalogue import CATALOGUE
from branchlake_dagster.sda.assets.conjunctions import CONJUNCTIONS

_SHOWN = 5
_PAIR = ["sat1_object_designator", "sat2_object_designator"]
_EPOCHS = ["sat1_element_epoch", "sat2_element_epoch"]
_PROBABILITY = ["collision_probability", "max_collision_probability", "no_probability_because"]
_TEXTS = {
    "ordered_and_unique": "Each event once, the smaller catalog number first.",
    "probability_or_reason": "Each row has a probability, at most the maximum, or a reason for its absence.",
    "of_known_objects": "Both objects are in the catalog, with the element sets that were screened.",
}


@dg.multi_asset_check(
    name="sda__conjunctions__listing",
    specs=[
        dg.AssetCheckSpec(
            name,
            asset=CONJUNCTIONS,
            description=text,
            additional_deps=[CATALOGUE] if name == "of_known_objects" else None,
            metadata={"branchlake/scope": "table"},
        )
        for name, text in _TEXTS.items()
    ],
    can_subset=True,
)
def listing_checks(
    context: dg.AssetCheckExecutionContext, lakehouse: LakehouseResource
) -> Iterator[dg.AssetCheckResult]:
    """Read some columns of the whole list on the run's branch, and report rows that break a rule."""
    catalog = lakehouse.catalog()
    rows, catalogue = (
        pl.DataFrame(
            pl.from_arrow(catalog.load_table(tuple(key.path)).scan(selected_fields=columns).to_arrow())
        )
        for key, columns in (
            (CONJUNCTIONS, ("event_id", *_PAIR, *_EPOCHS, *_PROBABILITY)),
            (CATALOGUE, ("sat_no", "epoch")),
        )
    )
    found = find_breaches(rows, catalogue)
    for check in sorted(context.selected_asset_check_keys):
        bad = found[check.name]
        yield dg.AssetCheckResult(
            passed=bad.is_empty(),
            asset_key=CONJUNCTIONS,
            check_name=check.name,
            metadata={
                "failing_rows": bad.height,
                "total_rows": rows.height,
                "examples": dg.MetadataValue.text(str(bad.head(_SHOWN).rows())),
            },
        )


def find_breaches(rows: pl.DataFrame, catalogue: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Return the rows that break each of the rules, by the rule's name.

    Args:
        rows: The list, with events, pairs, epochs and probabilities.
        catalogue: The columns ``sat_no`` and ``epoch``.
    """
    event = [*_PAIR, "event_id"]
    copies = rows.group_by(event).len("copies")
    wrong_order = pl.col(_PAIR[0]) >= pl.col(_PAIR[1])
    probability, largest, why_not = (pl.col(name) for name in _PROBABILITY)
    unknown = [
        rows.select(event_id="event_id", sat_no=number, epoch=epoch).join(
            catalogue.with_columns(pl.col("epoch").cast(rows.schema[epoch])),
            on=["sat_no", "epoch"],
            how="anti",
        )
        for number, epoch in zip(_PAIR, _EPOCHS, strict=True)
    ]
    return {
        "ordered_and_unique": copies.filter((pl.col("copies") > 1) | wrong_order).sort(event),
        "probability_or_reason": rows.filter(
            (probability.is_null() != why_not.is_not_null()) | (probability > largest)
        ).select("event_id", *_PROBABILITY),
        "of_known_objects": pl.concat(unknown),
    }
