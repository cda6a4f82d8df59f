"""A check that no two rows of a partition share a key."""

from __future__ import annotations

import dagster as dg

from branchlake_dagster import sql_check

DUPLICATES = "SELECT {key}, count(*) AS copies FROM {{this}} GROUP BY {key} HAVING count(*) > 1"
"""SQL that selects the repeated values of a key."""


def unique_key(
    asset: dg.AssetKey, key: str, partitions: dg.PartitionsDefinition[str]
) -> dg.AssetChecksDefinition:
    """Build the check `no_duplicates` of an asset. `key` are column names, separated by commas."""
    return sql_check(
        asset,
        "no_duplicates",
        DUPLICATES.format(key=key),
        partitions_def=partitions,
        description=f"No two rows share {key}.",
    )
