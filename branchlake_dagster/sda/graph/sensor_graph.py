"""The part of the graph that depends on the kinds of sensor: from sensors' messages to tracks."""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg

from branchlake_dagster import join_checks, pandera_checks, sql_check
from branchlake_dagster.sda.assets.associations import ASSOCIATIONS, association_asset
from branchlake_dagster.sda.assets.observations import (
    OBSERVATIONS,
    REJECTED_OBSERVATIONS,
    observation_assets,
)
from branchlake_dagster.sda.assets.raw import Where, live_sensors
from branchlake_dagster.sda.assets.tracks import FUSED_TRACKS, track_asset
from branchlake_dagster.sda.contracts.by_kind import (
    association_contract,
    fused_track_contract,
    observation_contract,
    rejected_observation_contract,
)
from branchlake_dagster.sda.contracts.fields import DataMode
from branchlake_dagster.sda.estimation import preference
from branchlake_dagster.sda.estimation.preference import MAX_EDITED_SHARE, MAX_SIGMA_RATIO
from branchlake_dagster.sda.graph.balance import balance_check
from branchlake_dagster.sda.graph.unique_keys import unique_key
from branchlake_dagster.sda.partitions import windows
from branchlake_dagster.sda.sensor_kinds.declaration import SensorKind
from branchlake_dagster.sda.sensor_kinds.registered import unique_sensor_kinds
from branchlake_dagster.sda.sensors.models import MEASUREMENT_COLUMNS, STATION_COLUMNS

MAX_CHI2_PER_DOF = 10.0
MAX_EDITED_OBSERVATIONS = 0.05
"""The largest share of a window's observations that tracks may leave out.

Associated observations are within their gates (the largest accepted distances): on real element sets the
share is below 0.1 %.
"""
MAX_UNCORRELATED_SHARE = 0.2
"""The largest share of a kind's observations that may belong to no object.

On real element sets up to two days old it is 5 to 11 %.
"""


def sensor_graph(
    kinds: Sequence[SensorKind],
    source: Where = "landing",
    receivers: Sequence[str] = (),
    data_mode: DataMode = "REAL",
    *,
    keep_value: bool = False,
) -> dg.Definitions:
    """Return the assets and checks that depend on kinds of sensor.

    These are the ingestions and raw tables, `observations`, `rejected_observations`, `associations` and
    `fused_tracks`, with their checks.

    Args:
        kinds: The declarations of the kinds.
        source: Where the topics are: `kafka` or `landing`.
        receivers: The URLs of the receivers' monitors.
        data_mode: Whether the measurements are real, simulated, of a test or of an exercise.
        keep_value: Whether the bytes of all measurements are kept, so that `branchlake reprocess --from-raw`
            can decode them again.

    Raises:
        ConfigurationError: Two kinds have the same name, or there are none.
    """
    kinds = unique_sensor_kinds(kinds)
    graph = dg.Definitions(assets=sensor_assets(kinds, data_mode), asset_checks=sensor_checks(kinds))
    return dg.Definitions.merge(graph, live_sensors(source, receivers, kinds, keep_value=keep_value))


def sensor_assets(kinds: Sequence[SensorKind], data_mode: DataMode = "REAL") -> list[dg.AssetsDefinition]:
    """Return the assets `observations`, `rejected_observations`, `associations` and `fused_tracks`."""
    return [*observation_assets(kinds, data_mode), association_asset(kinds), track_asset(kinds)]


def sensor_checks(kinds: Sequence[SensorKind]) -> list[dg.AssetChecksDefinition]:
    """Return the checks of the assets of `sensor_assets`."""
    source_kinds = [kind.source_kind for kind in kinds]
    observations = " + ".join(["n_edited", *(f"n_{kind}" for kind in source_kinds)])
    return join_checks(
        [
            pandera_checks(OBSERVATIONS, observation_contract(source_kinds), partitions_def=windows),
            unique_key(OBSERVATIONS, "observation_id", windows),
            sql_check(
                OBSERVATIONS,
                "fields_of_kind",
                _wrong_fields(kinds),
                partitions_def=windows,
                description="Each kind has its own measurement and no other, above ground, within its"
                " window.",
            ),
            balance_check(kinds),
            pandera_checks(
                REJECTED_OBSERVATIONS, rejected_observation_contract(source_kinds), whole_table=True
            ),
            pandera_checks(ASSOCIATIONS, association_contract(source_kinds), partitions_def=windows),
            unique_key(ASSOCIATIONS, "observation_id", windows),
            sql_check(
                ASSOCIATIONS,
                "few_uncorrelated",
                f"""
            SELECT source_kind, count(*) AS observations, count_if(result = 'uncorrelated') AS uncorrelated
            FROM {{this}} GROUP BY source_kind
            HAVING count_if(result = 'uncorrelated') > {MAX_UNCORRELATED_SHARE} * count(*)
            """,  # noqa: S608 - built from constants
                severity="warn",
                partitions_def=windows,
                description=f"At most {MAX_UNCORRELATED_SHARE:.0%} of a kind of sensor have no object.",
            ),
            pandera_checks(FUSED_TRACKS, fused_track_contract(source_kinds), partitions_def=windows),
            unique_key(FUSED_TRACKS, "window_start, sat_no", windows),
            sql_check(
                FUSED_TRACKS,
                "residuals",
                f"SELECT sat_no, chi2_per_dof FROM {{this}} WHERE chi2_per_dof > {MAX_CHI2_PER_DOF}",  # noqa: S608
                severity="warn",
                partitions_def=windows,
                description="Residuals agree with the stated noise; otherwise expect a wrong object.",
            ),
            sql_check(
                FUSED_TRACKS,
                "few_edited",
                f"""
            SELECT edited, observations FROM (
                SELECT sum(n_edited) AS edited, sum({observations}) AS observations FROM {{this}})
            WHERE edited > {MAX_EDITED_OBSERVATIONS} * observations
            """,  # noqa: S608 - built from constants
                severity="warn",
                partitions_def=windows,
                description=f"At most {MAX_EDITED_OBSERVATIONS:.0%} of the observations disagree.",
            ),
            sql_check(
                FUSED_TRACKS,
                "preferred_are_better",
                f"""
            SELECT sat_no, position_sigma_km, prior_sigma_km, chi2_per_dof, n_edited FROM {{this}}
            WHERE is_preferred AND (
                prior_sigma_km IS NULL OR position_sigma_km > {MAX_SIGMA_RATIO * 1.000001} * prior_sigma_km
                OR chi2_per_dof > {preference.MAX_CHI2_PER_DOF}
                OR n_edited > {MAX_EDITED_SHARE} * ({observations}))
            """,  # noqa: S608 - built from constants
                partitions_def=windows,
                description=f"Preferred states have at most {MAX_SIGMA_RATIO:.0%} of the set's error.",
            ),
        ]
    )


def _wrong_fields(kinds: Sequence[SensorKind]) -> str:
    """Return SQL for the observations that break a rule of their kind.

    They lack a measured value of their kind, have a value of another kind, are below the Earth's surface, or
    lie outside of their window.
    """
    measured = [name for name in MEASUREMENT_COLUMNS if name not in STATION_COLUMNS and "_unc_" not in name]
    cases = " ".join(
        f"WHEN '{kind.source_kind}' THEN "
        + " AND ".join(f"{name} IS {'NOT ' if name in kind.model.columns else ''}NULL" for name in measured)
        for kind in kinds
    )
    return f"""
SELECT source_kind, observation_id FROM {{this}}
WHERE NOT (CASE source_kind {cases} ELSE false END)
   OR pos_x_km * pos_x_km + pos_y_km * pos_y_km + pos_z_km * pos_z_km < 6378.137 * 6378.137
   OR sensor_timestamp < window_start OR sensor_timestamp >= window_start + INTERVAL 1 HOUR
"""  # noqa: S608 - built from constants
