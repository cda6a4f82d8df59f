"""The asset checks: row contracts, and rules about several rows or columns as SQL."""

from __future__ import annotations

import dagster as dg

from branchlake_dagster import join_checks, pandera_checks, sql_check
from branchlake_dagster.sda import contracts
from branchlake_dagster.sda.assets.alerts import CONJUNCTION_ALERTS
from branchlake_dagster.sda.assets.catalogue import (
    CATALOGUE,
    ELEMENT_SETS,
    REJECTED_RECORDS,
    SATELLITE_ENTRIES,
)
from branchlake_dagster.sda.assets.conjunctions import CONJUNCTIONS
from branchlake_dagster.sda.assets.ephemerides import EPHEMERIS_CONJUNCTIONS
from branchlake_dagster.sda.assets.hour_reports import HOUR_REPORTS
from branchlake_dagster.sda.assets.quarantine import QUARANTINED_OBJECTS
from branchlake_dagster.sda.assets.registry import ELEMENT_HISTORY, MERGE_AUDIT, OBJECTS, SATELLITES
from branchlake_dagster.sda.assets.risks import CONJUNCTION_RISKS
from branchlake_dagster.sda.assets.trust import ELEMENT_ERRORS, ELEMENT_JUMPS, OBJECT_ERRORS
from branchlake_dagster.sda.graph.agreement import tracked_have_elements
from branchlake_dagster.sda.graph.listing import listing_checks
from branchlake_dagster.sda.graph.unique_keys import DUPLICATES, unique_key
from branchlake_dagster.sda.partitions import gp_snapshots, windows

MAX_REJECTED_SHARE = 0.01
"""The largest share of a snapshot's records that may be rejected.

In real snapshots it is one in ten thousand. One in a hundred means that the provider's file is broken.
"""

MAX_REJECTED = 10
"""The number of rejected records that is accepted at any share, unless they are most of the file."""

MAX_QUARANTINED_SHARE = 0.05
MAX_ERROR_OF_A_DAY_KM = 50.0
"""The largest error along the track after a day.

In real history it is 21 km for the lowest class of orbits, and 0.2 to 6 km for the others.
"""
MAX_MISFIT = 3.0


_REJECTED_SHARE = f"""
SELECT r.snapshot_id, r.rejected, coalesce(e.accepted, 0) AS accepted
FROM (SELECT snapshot_id, count(*) AS rejected FROM nessie.sda.rejected_records
      WHERE reason NOT IN ('duplicate_object', 'ephemeris_type') GROUP BY snapshot_id) AS r
LEFT JOIN (SELECT snapshot_id, count(*) AS accepted FROM nessie.sda.element_sets
           GROUP BY snapshot_id) AS e ON e.snapshot_id = r.snapshot_id
WHERE r.rejected > {MAX_REJECTED_SHARE} * (r.rejected + coalesce(e.accepted, 0))
  AND r.rejected > least({MAX_REJECTED}, coalesce(e.accepted, 0))
"""  # noqa: S608 - built from constants

_UNORDERED_ENTRIES = """
SELECT alert_id, count(*) AS entries, max(sequence) AS last_sequence FROM {this} GROUP BY alert_id
HAVING count_if(kind = 'insert') <> max(sequence) + 1
    OR count(DISTINCT sequence, kind) <> count(*)
    OR count_if(kind = 'retract') < max(sequence)
"""

_REPEATED = """
SELECT sat1_object_designator, sat2_object_designator, {tca}, count(*) AS copies FROM {{this}}
GROUP BY sat1_object_designator, sat2_object_designator, {tca}
HAVING count(*) > 1 OR sat1_object_designator >= sat2_object_designator
"""


fusion_checks: list[dg.AssetChecksDefinition] = join_checks(
    [
        pandera_checks(ELEMENT_SETS, contracts.ElementSet, partitions_def=gp_snapshots),
        unique_key(ELEMENT_SETS, "snapshot_id, sat_no", gp_snapshots),
        sql_check(
            ELEMENT_SETS,
            "rejected_share",
            _REJECTED_SHARE,
            partitions_def=gp_snapshots,
            description=f"At most {MAX_REJECTED_SHARE:.0%} of a snapshot's records were damaged, or few.",
        ),
        pandera_checks(REJECTED_RECORDS, contracts.RejectedRecord, partitions_def=gp_snapshots),
        pandera_checks(SATELLITE_ENTRIES, contracts.SatelliteEntry, partitions_def=gp_snapshots),
        pandera_checks(CATALOGUE, contracts.CatalogueEntry, whole_table=True),
        pandera_checks(OBJECTS, contracts.RegisteredObject, whole_table=True),
        tracked_have_elements,
        pandera_checks(ELEMENT_HISTORY, contracts.ElementSet, whole_table=True),
        pandera_checks(MERGE_AUDIT, contracts.MergeOutcome, partitions_def=gp_snapshots),
        pandera_checks(SATELLITES, contracts.Satellite, whole_table=True),
        sql_check(
            SATELLITES,
            "one_that_holds",
            """
        SELECT sat_no, count(*) AS holding FROM {this} WHERE valid_to IS NULL
        GROUP BY sat_no HAVING count(*) > 1
        """,
            description="Each object has at most one open period.",
        ),
        pandera_checks(QUARANTINED_OBJECTS, contracts.QuarantinedObject, partitions_def=windows),
        sql_check(
            QUARANTINED_OBJECTS,
            "few",
            f"""
        SELECT quarantined, objects FROM (SELECT count(*) AS quarantined FROM {{this}}),
            (SELECT count(*) AS objects FROM nessie.sda.catalogue)
        WHERE quarantined > {MAX_QUARANTINED_SHARE} * objects
        """,  # noqa: S608 - built from constants
            severity="warn",
            partitions_def=windows,
            description=f"At most {MAX_QUARANTINED_SHARE:.0%} of the objects are quarantined.",
        ),
        pandera_checks(CONJUNCTION_RISKS, contracts.ConjunctionRisk, partitions_def=windows),
        sql_check(
            CONJUNCTION_RISKS,
            "ordered_and_unique",
            _REPEATED.format(tca="risk_window_start"),
            partitions_def=windows,
            description="Each pair once in a window of 30 s, the smaller catalog number first.",
        ),
        pandera_checks(CONJUNCTION_ALERTS, contracts.ConjunctionAlert),
        sql_check(
            CONJUNCTION_ALERTS,
            "entries_alternate",
            _UNORDERED_ENTRIES,
            description="Each alert's inserts and retracts alternate, and their numbers have no gap.",
        ),
        pandera_checks(HOUR_REPORTS, contracts.HourReport, partitions_def=windows),
        pandera_checks(EPHEMERIS_CONJUNCTIONS, contracts.EphemerisConjunction, whole_table=True),
        pandera_checks(ELEMENT_ERRORS, contracts.ElementError, whole_table=True),
        sql_check(
            ELEMENT_ERRORS,
            "error_of_a_day",
            f"""
        SELECT DISTINCT orbit_class, sigma0_t_km + rate_t AS error_km FROM {{this}}
        WHERE sigma0_t_km + rate_t > {MAX_ERROR_OF_A_DAY_KM}
        """,  # noqa: S608 - built from constants
            severity="warn",
            description=f"The error along the track after a day is at most {MAX_ERROR_OF_A_DAY_KM:g} km.",
        ),
        sql_check(
            ELEMENT_ERRORS,
            "enough_samples",
            """
        SELECT DISTINCT orbit_class, curve_of FROM {this}
        WHERE curve_of IS NULL OR curve_of <> orbit_class
        """,
            severity="warn",
            description="Every class of orbits has enough samples for its own curve.",
        ),
        sql_check(
            ELEMENT_ERRORS,
            "curves_fit",
            f"""
        SELECT orbit_class, age_days, sigma_t_km, fitted_t_km FROM {{this}}
        WHERE greatest(fitted_t_km / sigma_t_km, sigma_t_km / fitted_t_km) > {MAX_MISFIT}
        """,  # noqa: S608 - built from constants
            severity="warn",
            description=f"Curves and measured errors differ by at most a factor of {MAX_MISFIT:g}.",
        ),
        pandera_checks(OBJECT_ERRORS, contracts.ObjectError, whole_table=True),
        sql_check(
            OBJECT_ERRORS,
            "no_duplicates",
            DUPLICATES.format(key="sat_no"),
            description="Each object has one row.",
        ),
        pandera_checks(ELEMENT_JUMPS, contracts.ElementJump, whole_table=True),
        pandera_checks(CONJUNCTIONS, contracts.Conjunction, whole_table=True),
        listing_checks,
    ]
)
"""The asset checks of the graph, without those of `sensor_graph`."""
