"""Asset `associations`: the catalog object that each observation belongs to."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
from collections.abc import Sequence

import dagster as dg
import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

from branchlake_dagster import LakehouseResource, column_metadata, consumes, table_metadata
from branchlake_dagster.sda.assets.catalogue import CATALOGUE
from branchlake_dagster.sda.assets.observations import GROUP, OBSERVATIONS
from branchlake_dagster.sda.assets.quarantine import of_tracked
from branchlake_dagster.sda.assets.trust import ELEMENT_ERRORS, OBJECT_ERRORS, published_errors
from branchlake_dagster.sda.assets.upkeep import OF_WINDOWS, OWNERS
from branchlake_dagster.sda.association.arrow import ASSOCIATION_SCHEMA, OBSERVATION_INPUT, associate_batches
from branchlake_dagster.sda.association.rules import assumed_position_sigma
from branchlake_dagster.sda.contracts.by_kind import association_contract
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.partitions import whole_catalogue, windows
from branchlake_dagster.sda.sensor_kinds.declaration import SensorKind
from branchlake_dagster.sda.sensor_kinds.registered import measurement_models
from branchlake_dagster.sda.shipping import map_in_arrow
from branchlake_dagster.sda.windows import window_of

ASSOCIATIONS = dg.AssetKey(["sda", "associations"])


def association_asset(kinds: Sequence[SensorKind]) -> dg.AssetsDefinition:
    """Build the asset `associations`, which assigns observations of the given sensor kinds to objects."""
    models = measurement_models(kinds)

    @dg.asset(
        key=ASSOCIATIONS,
        group_name=GROUP,
        partitions_def=windows,
        owners=OWNERS,
        kinds={"iceberg", "spark"},
        freshness_policy=OF_WINDOWS,
        ins={
            "observations": dg.AssetIn(OBSERVATIONS),
            "catalogue": dg.AssetIn(CATALOGUE, partition_mapping=whole_catalogue),
        },
        deps=[ELEMENT_ERRORS, OBJECT_ERRORS],
        metadata=table_metadata(partition_by="window_start", require_checks=True)
        | consumes({OBSERVATIONS: "range"}, on="sensor_timestamp")
        | column_metadata(association_contract(list(models))),
    )
    def associations(
        context: dg.AssetExecutionContext,
        observations: DataFrame,
        catalogue: pa.Table,
        lakehouse: LakehouseResource,
    ) -> DataFrame:
        """Assign each observation of the hour to a catalog object, or to none, and report the distance.

        An object's predicted position comes from its element set. The uncertainty of the prediction comes
        from the published error model, or is assumed if no error model exists yet.
        """
        start, end = window_of(context)
        elements = Elements.from_arrow(of_tracked(catalogue).sort_by("sat_no"))
        middle = np.full(len(elements), (start + end) // 2)
        model = published_errors(lakehouse.catalog())
        if model is None:
            context.log.warning("There is no error model yet: the errors of the element sets are assumed.")
            sigma_km = assumed_position_sigma(elements, middle)
        else:
            sigma_km = model.position_sigma(elements, middle)
        associate = associate_batches(elements, sigma_km, start, end, models)
        by_sensor = observations.select(*OBSERVATION_INPUT).repartition("source_id")
        return map_in_arrow(by_sensor, associate, ASSOCIATION_SCHEMA)

    return associations
