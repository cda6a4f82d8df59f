"""Assets that measure how accurate the element sets of the catalog are.

`element_errors` has the error by the age of an element set, `object_errors` the differences between objects,
and `element_jumps` the element sets that do not continue the earlier ones.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
from collections.abc import Iterator
from typing import TYPE_CHECKING

import dagster as dg
import polars as pl
from pydantic import Field
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NoSuchTableError
from pyspark.sql import DataFrame

from branchlake_dagster import column_metadata, table_metadata
from branchlake_dagster.sda.assets.catalogue import GROUP
from branchlake_dagster.sda.assets.registry import ELEMENT_HISTORY
from branchlake_dagster.sda.assets.upkeep import OWNERS
from branchlake_dagster.sda.contracts import ElementError, ElementJump, ObjectError
from branchlake_dagster.sda.reports.pictures import draw_chart, to_markdown
from branchlake_dagster.sda.trust.classes import OWN_CLASSES
from branchlake_dagster.sda.trust.distributed import compute_error_model
from branchlake_dagster.sda.trust.tables import PublishedErrors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ELEMENT_ERRORS = dg.AssetKey(["sda", "element_errors"])
OBJECT_ERRORS = dg.AssetKey(["sda", "object_errors"])
ELEMENT_JUMPS = dg.AssetKey(["sda", "element_jumps"])
HISTORY_DAYS = 75.0


class ErrorsConfig(dg.Config):
    """The run configuration: how many days of the element history are compared."""

    history_days: float = Field(HISTORY_DAYS, gt=0, description="Days before the newest epoch.")


def _out(key: dg.AssetKey, model: type, description: str) -> dg.AssetOut:
    return dg.AssetOut(
        key=key,
        description=description,
        owners=OWNERS,
        kinds={"iceberg", "spark"},
        metadata=table_metadata(write_mode="replace_table", require_checks=True) | column_metadata(model),
    )


@dg.multi_asset(
    name="element_trust",
    group_name=GROUP,
    ins={"element_history": dg.AssetIn(ELEMENT_HISTORY, partition_mapping=dg.AllPartitionMapping())},
    outs={
        "element_errors": _out(
            ELEMENT_ERRORS,
            ElementError,
            "Error of element sets by age and class of orbit, derived from later sets.",
        ),
        "object_errors": _out(
            OBJECT_ERRORS,
            ObjectError,
            "Ratio of each object's error to the error that is usual in its class.",
        ),
        "element_jumps": _out(
            ELEMENT_JUMPS,
            ElementJump,
            "Element sets that do not continue the earlier ones: possible maneuvers and wrong sets.",
        ),
    },
)
def element_trust(
    context: dg.AssetExecutionContext, config: ErrorsConfig, element_history: DataFrame
) -> Iterator[dg.Output[DataFrame]]:
    """Compare each element set with later ones of the same object, and derive its error by its age."""
    with compute_error_model(element_history, config.history_days) as model:
        context.log.info(
            f"{model.element_sets:,} element sets of {model.objects:,} objects, {model.differences:,} "
            f"differences, {model.affected:,} of them across one of {sum(model.jumps.values()):,} jumps."
        )
        errors = pl.DataFrame(pl.from_arrow(model.element_errors.toArrow()))
        yield dg.Output(
            model.element_errors,
            "element_errors",
            metadata={
                "element_sets": model.element_sets,
                "differences": model.differences,
                "left_out_across_jumps": model.affected,
                "along_the_track": dg.MetadataValue.md(to_markdown(draw_growth(errors), "Error against age")),
            },
        )
        yield dg.Output(model.object_errors, "object_errors", metadata={"objects": model.objects})
        yield dg.Output(model.element_jumps, "element_jumps", metadata={"kinds": model.jumps})


def draw_growth(errors: pl.DataFrame) -> "Figure":
    """Draw the error along the orbit by age and orbit class: measured errors as dots, fits as lines."""
    measured = errors.filter(
        pl.col("sigma_t_km").is_not_null() & (pl.col("sigma_t_km") > 0) & (pl.col("age_days") > 0)
    )
    dots, lines = {}, {}
    for one in OWN_CLASSES:
        of_class = measured.filter(orbit_class=one.value)
        if of_class.height:
            dots[one.value] = list(of_class.select("age_days", "sigma_t_km").iter_rows())
            fitted = of_class.filter(pl.col("fitted_t_km") > 0)
            lines[one.value] = list(fitted.select("age_days", "fitted_t_km").iter_rows())
    return draw_chart(
        "Error of element sets along the track (68 %)", "age, days", "km", lines, dots=dots, log=(True, True)
    )


def published_errors(tables: Catalog) -> PublishedErrors | None:
    """Load the error model from the run's branch. None if its tables do not exist or are empty."""
    try:
        errors, objects = (
            pl.DataFrame(tables.load_table(tuple(key.path)).scan().to_arrow())
            for key in (ELEMENT_ERRORS, OBJECT_ERRORS)
        )
    except NoSuchTableError:
        return None
    return None if errors.is_empty() else PublishedErrors.from_tables(errors, objects)
