"""Outcomes as Dagster shows them: one `AssetCheckResult` with counts, examples and branch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import dagster as dg

from branchlake_dagster.checks.constraints.model import FailingPartitions, Outcome

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.sql import DataFrame

PROVED_BY = "branchlake/proved_by"
"""In a check's metadata: `metadata` when no row was read for it, `rows` when few were, without Spark."""
FAILING_PARTITIONS = "branchlake/failing_partitions"
"""In a check's metadata: the partitions of the failing rows, where the check read several partitions."""
_SHOWN_COLUMNS = 12
_BRANCH_CONF = "spark.sql.catalog.nessie.ref"


def branch_of(rows: DataFrame) -> str | None:
    """The Nessie reference the session of `rows` reads, None where no such catalogue is configured."""
    return rows.sparkSession.conf.get(_BRANCH_CONF, None)


def words_of(error: PySparkException) -> str:
    """What Spark says in `error`, without the server's stack: a Connect error carries 40 lines of it."""
    lines = str(error).strip().splitlines()
    stack = (n for n, line in enumerate(lines) if line.startswith(("JVM stacktrace", "org.apache.", "\tat ")))
    return "\n".join(lines[: next(stack, None)]).strip()


def asset_check_result(
    name: str, text: str, outcome: Outcome, *, warn: bool, evaluation: str, branch: str | None
) -> dg.AssetCheckResult:
    """The result of check `name`, whose promise is `text`.

    Severity is WARN for `warn`, else ERROR. Metadata: `constraint`, `evaluation`, and where known
    `branch`, `failing_rows` and `total_rows` (counts), `failing_ratio` (0..1), `examples` (a table of at
    most 12 columns), `note`, `branchlake/failing_partitions` (a table of at most 5 partitions); with a proof
    `branchlake/proved_by` and the files and rows that were looked at.
    """
    metadata: dict[str, dg.MetadataValue] = {
        "constraint": dg.MetadataValue.text(text),
        "evaluation": dg.MetadataValue.text(evaluation),
    }
    if branch is not None:
        metadata["branch"] = dg.MetadataValue.text(branch)
    if outcome.failing is not None:
        metadata["failing_rows"] = dg.MetadataValue.int(outcome.failing)
    if outcome.total is not None:
        metadata["total_rows"] = dg.MetadataValue.int(outcome.total)
    if outcome.failing is not None and outcome.total:
        metadata["failing_ratio"] = dg.MetadataValue.float(outcome.failing / outcome.total)
    if outcome.examples:
        metadata["examples"] = _table(outcome.examples)
    if outcome.partitions is not None:
        metadata[FAILING_PARTITIONS] = _partitions(outcome.partitions)
    if outcome.proof is not None:
        metadata[PROVED_BY] = dg.MetadataValue.text(outcome.proof.by)
        metadata["branchlake/proved_by_files"] = dg.MetadataValue.int(outcome.proof.files)
        metadata["branchlake/proved_by_rows"] = dg.MetadataValue.int(outcome.proof.rows)
    if outcome.note:
        metadata["note"] = dg.MetadataValue.text(outcome.note)
    return dg.AssetCheckResult(
        check_name=name,
        passed=outcome.passed,
        severity=dg.AssetCheckSeverity.WARN if warn else dg.AssetCheckSeverity.ERROR,
        metadata=metadata,
        description=_sentence(text, outcome),
    )


def _sentence(text: str, outcome: Outcome) -> str:
    if outcome.passed:
        return f"Holds: {text}."
    if outcome.failing is None:
        return f"Fails: {text}: {outcome.note}." if outcome.note else f"Fails: {text}."
    of = "" if outcome.total is None else f" of {outcome.total}"
    where = f", in partitions {outcome.partitions.text}" if outcome.partitions is not None else ""
    return f"{outcome.failing}{of} rows fail{where}: {text}."


def _partitions(found: FailingPartitions) -> dg.TableMetadataValue:
    columns = [dg.TableColumn("partition", "string"), dg.TableColumn("failing_rows", "int")]
    return dg.MetadataValue.table(
        records=[
            dg.TableRecord({"partition": name, "failing_rows": rows})
            for name, rows in found.rows_by_partition.items()
        ],
        schema=dg.TableSchema(columns=columns),
    )


def _table(examples: Sequence[Mapping[str, str | None]]) -> dg.TableMetadataValue:
    columns = list(examples[0])[:_SHOWN_COLUMNS]
    return dg.MetadataValue.table(
        records=[dg.TableRecord({column: example[column] for column in columns}) for example in examples],
        schema=dg.TableSchema(columns=[dg.TableColumn(column, "string") for column in columns]),
    )
