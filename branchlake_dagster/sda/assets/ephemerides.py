"""Asset `ephemeris_conjunctions`: close approaches of the operator's own ephemerides.

An ephemeris is a table of an object's positions and velocities over time. The asset reads ephemerides from
files in a folder and compares them with the element sets of the catalog.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import polars as pl
from pydantic import Field
from pyspark.sql import DataFrame

from branchlake_dagster import BranchSparkResource, LakehouseResource, column_metadata, table_metadata
from branchlake_dagster.sda.assets.catalogue import CATALOGUE
from branchlake_dagster.sda.assets.quarantine import of_tracked
from branchlake_dagster.sda.assets.upkeep import OWNERS
from branchlake_dagster.sda.contracts import EphemerisConjunction
from branchlake_dagster.sda.ephemerides.distributed import FileScreening, screen_files
from branchlake_dagster.sda.gp.limits import ReadLimits
from branchlake_dagster.sda.messages.errors import UnreadableMessage
from branchlake_dagster.sda.orbits.propagation import Elements

EPHEMERIS_CONJUNCTIONS = dg.AssetKey(["sda", "ephemeris_conjunctions"])
_ENDINGS = (".oem", ".kvn", ".xml", ".gz")


class EphemeridesConfig(dg.Config):
    """The run configuration: folder of ephemerides, largest miss distance, and objects to leave out."""

    folder: str = Field(description="Folder of Orbit Ephemeris Messages: .oem, .kvn, .xml, also gzipped.")
    threshold_km: float = Field(5.0, gt=0, description="Largest miss distance kept, km.")
    max_element_age_days: float = Field(
        14.0, gt=0, description="Objects with older element sets at the start are left out."
    )
    exclude: list[int] = Field(
        default=[],
        description="Catalog numbers to leave out, in addition to the one with a file's OBJECT_ID.",
    )


@dg.asset(
    key=EPHEMERIS_CONJUNCTIONS,
    group_name="conjunctions",
    owners=OWNERS,
    kinds={"iceberg", "spark"},
    deps=[CATALOGUE],
    metadata=table_metadata(write_mode="replace_table", require_checks=True)
    | column_metadata(EphemerisConjunction),
)
def ephemeris_conjunctions(
    context: dg.AssetExecutionContext,
    config: EphemeridesConfig,
    lakehouse: LakehouseResource,
    spark: BranchSparkResource,
) -> Iterator[dg.Output[DataFrame]]:
    """List the catalog objects that come close to the ephemerides in a folder, within their usable times.

    A file without a usable segment fails the run. Other unusable records are logged and counted.
    """
    table = lakehouse.catalog().load_table(tuple(CATALOGUE.path)).scan().to_arrow()
    catalogue = pl.DataFrame(of_tracked(table)).sort("sat_no")
    names = [name for name in (*Elements.COLUMNS, "object_name", "object_id") if name in catalogue.columns]
    screening = FileScreening(
        catalogue.select(names), config.threshold_km, config.max_element_age_days, config.exclude
    )
    files = ((path.name, path.read_bytes()) for path in files_of(config.folder))
    screened = screen_files(spark.spark_session, files, screening, context.log.warning)
    # One file, sorted: the table is read as a whole.
    yield dg.Output(
        screened.rows.repartition(1).sortWithinPartitions(
            "ephemeris", "miss_distance_km", "tca", "sat2_object_designator"
        ),
        metadata={
            "files": screened.files,
            "close_approaches": screened.approaches,
            "records_not_used": screened.unusable_records,
        },
    )


def files_of(folder: str) -> list[Path]:
    """Return the ephemeris files of a folder, sorted by name.

    Raises:
        UnreadableMessage: The folder does not exist, it has no ephemeris file, or a file is too large.
    """
    place = Path(folder).expanduser()
    found = (
        sorted(p for p in place.iterdir() if p.is_file() and p.suffix.lower() in _ENDINGS)
        if place.is_dir()
        else []
    )
    if not found:
        raise UnreadableMessage(
            f"There is no ephemeris file in {folder}.",
            hint=f"Put files that end in {', '.join(_ENDINGS)} there.",
            reason="no_file",
            subject=str(folder),
        )
    if large := [p.name for p in found if p.stat().st_size > ReadLimits().max_bytes]:
        raise UnreadableMessage(f"Ephemeris file {large[0]} is too large.", hint="Divide it.")
    return found
