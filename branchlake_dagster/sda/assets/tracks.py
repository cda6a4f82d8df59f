"""Asset `fused_tracks`: one estimated state per object and hour.

A state is an object's position and velocity at one time. Its covariance matrix describes its uncertainty.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute functions.
from collections.abc import Sequence

import dagster as dg
import numpy as np
from pyspark.sql import DataFrame

from branchlake_dagster import LakehouseResource, column_metadata, consumes, table_metadata
from branchlake_dagster.sda.assets.associations import ASSOCIATIONS
from branchlake_dagster.sda.assets.catalogue import CATALOGUE
from branchlake_dagster.sda.assets.observations import OBSERVATIONS
from branchlake_dagster.sda.assets.quarantine import select_tracked
from branchlake_dagster.sda.assets.trust import ELEMENT_ERRORS, OBJECT_ERRORS, published_errors
from branchlake_dagster.sda.assets.upkeep import OF_WINDOWS, OWNERS
from branchlake_dagster.sda.association.rules import AssociationRules, assumed_position_sigma
from branchlake_dagster.sda.contracts.by_kind import fused_track_contract
from branchlake_dagster.sda.estimation.arrow import ELEMENT_INPUT, fuse_batches, track_schema
from branchlake_dagster.sda.estimation.prior import ElementPrior
from branchlake_dagster.sda.orbits.propagation import Elements
from branchlake_dagster.sda.partitions import whole_catalogue, windows
from branchlake_dagster.sda.sensor_kinds.declaration import SensorKind
from branchlake_dagster.sda.sensor_kinds.registered import measurement_models
from branchlake_dagster.sda.shipping import map_in_arrow
from branchlake_dagster.sda.windows import window_of

FUSED_TRACKS = dg.AssetKey(["sda", "fused_tracks"])


def track_asset(kinds: Sequence[SensorKind]) -> dg.AssetsDefinition:
    """Build the asset `fused_tracks`, which uses observations of the given kinds of sensor."""
    models = measurement_models(kinds)

    @dg.asset(
        key=FUSED_TRACKS,
        group_name="fused_tracks",
        partitions_def=windows,
        owners=OWNERS,
        kinds={"iceberg", "spark"},
        freshness_policy=OF_WINDOWS,
        ins={
            "observations": dg.AssetIn(OBSERVATIONS),
            "associations": dg.AssetIn(ASSOCIATIONS),
            "catalogue": dg.AssetIn(CATALOGUE, partition_mapping=whole_catalogue),
        },
        deps=[ELEMENT_ERRORS, OBJECT_ERRORS],
        metadata=table_metadata(partition_by="window_start", require_checks=True)
        | consumes({ASSOCIATIONS: "range"}, on="sensor_timestamp")
        | column_metadata(fused_track_contract(list(models))),
    )
    def fused_tracks(
        context: dg.AssetExecutionContext,
        observations: DataFrame,
        associations: DataFrame,
        catalogue: DataFrame,
        lakehouse: LakehouseResource,
    ) -> DataFrame:
        """Estimate position, velocity and their covariance for each object with associated observations.

        The object's element set is the prior of the estimate. `is_preferred` marks states that should be used
        instead of the element set. Observations with the result `claimed` are not used, because their object
        has no usable prediction.
        """
        start, end = window_of(context)
        errors = published_errors(lakehouse.catalog())
        if errors is None:
            context.log.warning("There is no error model yet: the errors of the element sets are assumed.")
        objects = select_tracked(catalogue).select(*ELEMENT_INPUT)
        elements = Elements.from_arrow(objects.select(*Elements.COLUMNS).toArrow())
        middle = np.full(len(elements), (start + end) // 2)
        position_sigma = assumed_position_sigma if errors is None else errors.position_sigma
        prior = ElementPrior.from_sigma(
            elements.sat_no, position_sigma(elements, middle), AssociationRules().sigma_factor
        )
        assigned = associations.where("result IN ('confirmed', 'reassigned')").select(
            "observation_id", "sat_no"
        )
        joined = observations.drop("sat_no").join(assigned, on="observation_id").join(objects, on="sat_no")
        by_object = joined.repartition("sat_no")
        return map_in_arrow(by_object, fuse_batches(start, end, models, prior), track_schema(list(models)))

    return fused_tracks
