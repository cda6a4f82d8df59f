"""Rewrite the files of chosen partitions on Spark, by Iceberg's procedure `rewrite_data_files`.

The procedure also works on tables with `gc.enabled=false`, applies delete files and deletion vectors, and
removes delete files that have nothing left to delete. Its report is not used: with partial progress it once
reported success without a rewritten file (apache/iceberg#17202). The caller reads the manifests instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from branchlake_dagster.compaction.compaction_plan import CompactionOptions, PlannedPartition, Strategy
from branchlake_dagster.compaction.errors import RewriteFailed
from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster.spark.session import quote_spark_name, quote_spark_path, quote_spark_string

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SMALLEST_SHARE = 0.75
"""Iceberg requires that the limit of small files is below the target size. This is its default fraction."""


def rewrite_partitions(
    session: SparkSession, key: ContentKey, unit: Sequence[PlannedPartition], options: CompactionOptions
) -> None:
    """Rewrite the files of some partitions of one table on the session's branch, in one commit or not at all.

    If delete files have nothing left to delete, a second commit removes them. Raises RewriteFailed if Spark
    fails; an error after the first commit leaves the rewritten files on the branch.
    """
    try:
        session.sql(build_call(key, unit, options)).collect()
    except BranchlakeError:
        raise
    except Exception as error:
        raise RewriteFailed(
            f"Spark did not rewrite the files ({type(error).__name__}): {str(error).splitlines()[0]}",
            table=key.name,
            hint="Nothing was published. Repeat the compaction, or read Spark's log.",
        ) from error


def build_call(key: ContentKey, unit: Sequence[PlannedPartition], options: CompactionOptions) -> str:
    """Build the statement that calls the procedure for partitions of one table."""
    target_bytes = unit[0].measured.target_bytes
    smallest_bytes = min(options.small_file_bytes, int(target_bytes * _SMALLEST_SHARE))
    procedure_options = {
        "target-file-size-bytes": str(target_bytes),
        "min-file-size-bytes": str(smallest_bytes),
        "min-input-files": "2",
        "delete-file-threshold": "1",
    }
    if any(planned.measured.delete_files or planned.measured.dangling_deletes for planned in unit):
        procedure_options["remove-dangling-deletes"] = "true"
    if options.strategy is not Strategy.BIN_PACK:
        procedure_options["rewrite-all"] = "true"
    pairs = ", ".join(
        f"{quote_spark_string(name)}, {quote_spark_string(value)}"
        for name, value in procedure_options.items()
    )
    arguments = [
        f"table => {quote_spark_string(quote_spark_path(key))}",
        f"options => map({pairs})",
        f"where => {quote_spark_string(join_predicates(unit))}",
    ]
    if options.strategy is not Strategy.BIN_PACK:
        arguments.append("strategy => 'sort'")
    if options.strategy is Strategy.Z_ORDER:
        columns = ", ".join(map(quote_spark_name, options.sort_columns))
        arguments.append(f"sort_order => {quote_spark_string(f'zorder({columns})')}")
    elif options.sort_columns:
        arguments.append(f"sort_order => {quote_spark_string(', '.join(options.sort_columns))}")
    return f"CALL nessie.system.rewrite_data_files({', '.join(arguments)})"


def join_predicates(unit: Sequence[PlannedPartition]) -> str:
    """Return the predicate in Spark's SQL that selects all partitions of `unit`."""
    predicates = [planned.measured.predicate for planned in unit]
    if "true" in predicates:
        return "true"  # the only partition of a table without partitions
    return " OR ".join(f"({predicate})" for predicate in predicates)
