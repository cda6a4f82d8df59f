"""One Dagster step for several declarations on the same rows, and their results as Dagster shows them."""

# No `from __future__ import annotations`: Dagster reads the annotations of the compute function.
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import dagster as dg
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from branchlake_dagster.checks.constraints import (
    CheckFailedToRun,
    Constraint,
    FailingPartitions,
    Outcome,
    PanderaConstraint,
    SchemaConstraint,
    SqlConstraint,
)
from branchlake_dagster.checks.judge import Asked, FrameRows, Rows, Verdicts, judge
from branchlake_dagster.checks.stored_rows import TableRows
from branchlake_dagster.io_manager.loading import StoredRows
from branchlake_dagster.stored_names import EventMetadata

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
        metadata[EventMetadata.FAILING_PARTITIONS] = _partitions(outcome.partitions)
    if outcome.proof is not None:
        metadata[EventMetadata.PROVED_BY] = dg.MetadataValue.text(outcome.proof.by)
        metadata[EventMetadata.PROVED_BY_FILES] = dg.MetadataValue.int(outcome.proof.files)
        metadata[EventMetadata.PROVED_BY_ROWS] = dg.MetadataValue.int(outcome.proof.rows)
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


@dataclass(frozen=True)
class Declared:
    """One declaration: `what` it is called in errors, what it asks, and which names only warn."""

    what: str
    asked: Asked
    warned: frozenset[str]

    def only(self, names: Iterable[str]) -> "Declared":
        """The same for some of its checks."""
        wanted = set(names)
        constraints = [one for one in self.asked.constraints if one.name in wanted]
        return replace(self, asked=replace(self.asked, constraints=constraints))


_declared: WeakKeyDictionary[Any, tuple[Declared, ...]] = WeakKeyDictionary()
"""What each of our steps asks, by its op: Dagster copies definitions, and keeps the op."""


def declared_in(checks: dg.AssetChecksDefinition) -> tuple[Declared, ...]:
    """What `checks` ask; nothing where they are not made here."""
    names = [spec.name for spec in checks.check_specs]
    return tuple(one.only(names) for one in _declared.get(checks.node_def, ()))


def check_step(
    name: str,
    key: dg.AssetKey,
    specs: Sequence[dg.AssetCheckSpec],
    declared: Sequence[Declared],
    *,
    description: str,
    kind: str,
) -> dg.AssetChecksDefinition:
    """The step `name` that gives every check in `specs` its verdict.

    What cannot be evaluated is told at the end, when all others have theirs: CheckFailedToRun.
    """

    @dg.multi_asset_check(
        name=name,
        description=description,
        specs=specs,
        ins={"rows": dg.AssetIn(key)},
        compute_kind=kind,
        can_subset=True,
    )
    def checks(context: dg.AssetCheckExecutionContext, rows: StoredRows) -> Iterator[dg.AssetCheckResult]:
        selected = {check.name for check in context.selected_asset_check_keys}
        parts = [part for one in declared if (part := one.only(selected)).asked.constraints]
        yield from _results(rows, parts, key, view=f"branchlake_this_{name}", run_id=context.run.run_id)

    _declared[checks.node_def] = tuple(declared)
    return checks


def _results(
    given: DataFrame | StoredRows, parts: Sequence[Declared], key: dg.AssetKey, *, view: str, run_id: str
) -> Iterator[dg.AssetCheckResult]:
    spoken = {column for part in parts for one in part.asked.constraints for column in one.columns}
    rows: Rows = TableRows(given, spoken) if isinstance(given, StoredRows) else FrameRows(given)
    try:
        branch = given.ref if isinstance(given, StoredRows) else branch_of(given)
        verdicts = judge(rows, [part.asked for part in parts], view=view)
    except PySparkException as error:
        what = " and ".join(part.what for part in parts)
        raise _not_run(f"{what} on {key.to_user_string()}", error, run_id) from error
    for part in parts:
        for one in part.asked.constraints:
            if one.name in verdicts.outcomes:
                yield asset_check_result(
                    one.name,
                    one.text,
                    verdicts.outcomes[one.name],
                    warn=one.name in part.warned,
                    evaluation=_evaluation(one, verdicts.outcomes[one.name]),
                    branch=branch,
                )
    if verdicts.broken:
        raise _broken(verdicts, parts, key, run_id)


def _broken(verdicts: Verdicts, parts: Sequence[Declared], key: dg.AssetKey, run_id: str) -> CheckFailedToRun:
    """One error that tells what could not be evaluated; a cause that several share is told once."""
    told: dict[str, list[str]] = {}
    for part in parts:
        for one in part.asked.constraints:
            if one.name in verdicts.broken:
                error = verdicts.broken[one.name]
                words = words_of(error) if isinstance(error, PySparkException) else _words(error)
                what = part.what if isinstance(one, SqlConstraint) else f"{one.name} of {part.what}"
                told.setdefault(words, []).append(what)
    where = key.to_user_string()
    texts = [f"{', '.join(what)} on {where} could not be evaluated: {words}" for words, what in told.items()]
    failure = CheckFailedToRun("\n".join(texts), run_id=run_id, hint=_HINT)
    failure.__cause__ = next(iter(verdicts.broken.values()))
    return failure


_HINT = "Nothing is known about them, so the run will not be published. All other checks have their verdict."


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _not_run(what: str, error: PySparkException, run_id: str) -> CheckFailedToRun:
    return CheckFailedToRun(
        f"{what} could not be evaluated: {words_of(error)}",
        run_id=run_id,
        hint="Nothing is known about these rows, so the run will not be published.",
    )


_PROOFS = {
    "metadata": "from the metadata of the data files, no rows read",
    "rows": "on the few rows there are, read without Spark",
}


def _evaluation(constraint: Constraint, outcome: Outcome) -> str:
    if outcome.proof is not None:
        return _PROOFS[outcome.proof.by]
    if isinstance(constraint, SchemaConstraint):
        return "from the schema, no rows read"
    if isinstance(constraint, PanderaConstraint):
        return "by pandera itself, a query of its own, no counts"
    if isinstance(constraint, SqlConstraint):
        return constraint.sql.strip()
    return "in the one Spark job of the asset's checks"
