"""Assets that measure how accurate the element sets of the catalog are.

`element_errors` has the error by the age of an element set, `object_errors` the differences between objects,
and `element_jumps` the element sets that do not continue the earlier ones.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, cast

import dagster as dg
import numpy as np
import polars as pl
import pyarrow.compute as pc
from pydantic import Field
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.expressions import GreaterThanOrEqual
from pyiceberg.table import Table

from branchlake_dagster import LakehouseResource, column_metadata, table_metadata
from branchlake_dagster.sda.assets.catalogue import GROUP
from branchlake_dagster.sda.assets.registry import ELEMENT_HISTORY
from branchlake_dagster.sda.assets.upkeep import OWNERS
from branchlake_dagster.sda.contracts import ElementError, ElementJump, ObjectError
from branchlake_dagster.sda.orbits.propagation import ELEMENT_FIELDS, Elements
from branchlake_dagster.sda.reports.pictures import draw_chart, to_markdown
from branchlake_dagster.sda.trust.classes import OWN_CLASSES
from branchlake_dagster.sda.trust.model import build_error_model
from branchlake_dagster.sda.trust.tables import PublishedErrors
from branchlake_dagster.sda.trust.tables import element_errors as errors_of
from branchlake_dagster.sda.trust.tables import element_jumps as jumps_of
from branchlake_dagster.sda.trust.tables import object_errors as objects_of

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
        kinds={"iceberg", "numpy"},
        metadata=table_metadata(write_mode="replace_table", require_checks=True) | column_metadata(model),
    )


@dg.multi_asset(
    name="element_trust",
    group_name=GROUP,
    deps=[ELEMENT_HISTORY],
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
    context: dg.AssetExecutionContext, config: ErrorsConfig, lakehouse: LakehouseResource
) -> Iterator[dg.Output[pl.DataFrame]]:
    """Compare each element set with later ones of the same object, and derive its error by its age."""
    table = lakehouse.catalog().load_table(tuple(ELEMENT_HISTORY.path))
    history = history_of(table, config.history_days)
    model = build_error_model(history)
    objects = len(model.sat_no)
    context.log.info(
        f"{len(history):,} element sets of {objects:,} objects, {len(model.differences):,} differences, "
        f"{int(model.is_affected.sum()):,} of them across one of {len(model.jumps.pair):,} jumps."
    )
    errors = errors_of(model, history)
    yield dg.Output(
        errors,
        "element_errors",
        metadata={
            "element_sets": len(history),
            "differences": len(model.differences),
            "left_out_across_jumps": int(model.is_affected.sum()),
            "along_the_track": dg.MetadataValue.md(to_markdown(draw_growth(errors), "Error against age")),
        },
    )
    yield dg.Output(objects_of(model, history), "object_errors", metadata={"objects": objects})
    found = jumps_of(model, history)
    kinds = found.group_by("kind").len().sort("kind")
    yield dg.Output(found, "element_jumps", metadata={"kinds": dict(kinds.iter_rows())})


def history_of(table: Table, days: float) -> Elements:
    """Load the element sets whose epoch is within `days` days before the newest epoch in the table.

    The rows are sorted by object and epoch, and each epoch of an object occurs once: of several sets with the
    same epoch, the one that was collected last is kept. An empty table gives empty elements.
    """
    epochs = table.scan(selected_fields=("epoch",)).to_arrow().column("epoch")
    newest = cast("datetime | None", pc.max(epochs).as_py())
    if newest is None:
        return Elements(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, len(ELEMENT_FIELDS))))
    oldest = newest - timedelta(days=days)
    scan = table.scan(
        row_filter=GreaterThanOrEqual("epoch", oldest.isoformat()),
        selected_fields=(*Elements.COLUMNS, "collected_at", "snapshot_id"),
    )
    # If two files have different sets of one epoch, the later one is a correction.
    sets = pl.DataFrame(scan.to_arrow()).sort("sat_no", "epoch", "collected_at", "snapshot_id")
    return Elements.from_arrow(sets.unique(["sat_no", "epoch"], keep="last", maintain_order=True).to_arrow())


def draw_growth(errors: pl.DataFrame) -> "Figure":
    """Draw the error along the orbit by age and orbit class: measured errors as dots, fits as lines."""
    told = errors.filter(
        pl.col("sigma_t_km").is_not_null() & (pl.col("sigma_t_km") > 0) & (pl.col("age_days") > 0)
    )
    dots, lines = {}, {}
    for one in OWN_CLASSES:
        mine = told.filter(orbit_class=one.value)
        if mine.height:
            dots[one.value] = list(mine.select("age_days", "sigma_t_km").iter_rows())
            fitted = mine.filter(pl.col("fitted_t_km") > 0)
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
