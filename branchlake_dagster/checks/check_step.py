"""Run several check declarations on the same rows in one Dagster step, and build their results."""

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
    CheckOutcome,
    Constraint,
    FailingPartitions,
    PanderaConstraint,
    SchemaConstraint,
    SqlConstraint,
)
from branchlake_dagster.checks.judge import (
    CheckedRows,
    ConstraintGroup,
    FrameRows,
    Verdicts,
    judge_constraints,
)
from branchlake_dagster.checks.stored_rows import TableRows
from branchlake_dagster.io_manager.loading import StoredRows
from branchlake_dagster.stored_names import EventMetadata

_SHOWN_COLUMNS = 12
_BRANCH_CONF = "spark.sql.catalog.nessie.ref"


def find_session_ref(rows: DataFrame) -> str | None:
    """Return the Nessie reference that the Spark session of `rows` reads.

    None if the session has no catalog `nessie`.
    """
    return rows.sparkSession.conf.get(_BRANCH_CONF, None)


def format_spark_error(error: PySparkException) -> str:
    """Return Spark's message without the server's stack trace, which has 40 lines in a Connect error."""
    lines = str(error).strip().splitlines()
    stack = (n for n, line in enumerate(lines) if line.startswith(("JVM stacktrace", "org.apache.", "\tat ")))
    return "\n".join(lines[: next(stack, None)]).strip()


def build_check_result(
    name: str, description: str, outcome: CheckOutcome, *, warn: bool, evaluation: str, branch: str | None
) -> dg.AssetCheckResult:
    """Return the result of check `name`. `description` is the constraint for people.

    The severity is WARN with `warn`, otherwise ERROR. The metadata always has `constraint` and `evaluation`.
    If known, it has `branch`, `failing_rows` and `total_rows` (counts), `failing_ratio` (0 to 1), `examples`
    (a table of at most 12 columns), `note`, and `branchlake/failing_partitions` (a table of at most 5
    partitions). With a proof it has `branchlake/proved_by` and the numbers of inspected files and rows.
    `evaluation` says how the check was evaluated, and `branch` is the branch of the rows, None if unknown.
    """
    metadata: dict[str, dg.MetadataValue] = {
        "constraint": dg.MetadataValue.text(description),
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
        metadata["examples"] = _examples_table(outcome.examples)
    if outcome.partitions is not None:
        metadata[EventMetadata.FAILING_PARTITIONS] = _partitions_table(outcome.partitions)
    if outcome.proof is not None:
        metadata[EventMetadata.PROVED_BY] = dg.MetadataValue.text(outcome.proof.source)
        metadata[EventMetadata.PROVED_BY_FILES] = dg.MetadataValue.int(outcome.proof.files)
        metadata[EventMetadata.PROVED_BY_ROWS] = dg.MetadataValue.int(outcome.proof.rows)
    if outcome.note:
        metadata["note"] = dg.MetadataValue.text(outcome.note)
    return dg.AssetCheckResult(
        check_name=name,
        passed=outcome.passed,
        severity=dg.AssetCheckSeverity.WARN if warn else dg.AssetCheckSeverity.ERROR,
        metadata=metadata,
        description=_format_result(description, outcome),
    )


def _format_result(description: str, outcome: CheckOutcome) -> str:
    if outcome.passed:
        return f"Holds: {description}."
    if outcome.failing is None:
        return f"Fails: {description}: {outcome.note}." if outcome.note else f"Fails: {description}."
    of_total = "" if outcome.total is None else f" of {outcome.total}"
    in_partitions = f", in partitions {outcome.partitions.summary}" if outcome.partitions is not None else ""
    return f"{outcome.failing}{of_total} rows fail{in_partitions}: {description}."


def _partitions_table(failing_partitions: FailingPartitions) -> dg.TableMetadataValue:
    columns = [dg.TableColumn("partition", "string"), dg.TableColumn("failing_rows", "int")]
    return dg.MetadataValue.table(
        records=[
            dg.TableRecord({"partition": name, "failing_rows": rows})
            for name, rows in failing_partitions.rows_by_partition.items()
        ],
        schema=dg.TableSchema(columns=columns),
    )


def _examples_table(examples: Sequence[Mapping[str, str | None]]) -> dg.TableMetadataValue:
    columns = list(examples[0])[:_SHOWN_COLUMNS]
    return dg.MetadataValue.table(
        records=[dg.TableRecord({column: example[column] for column in columns}) for example in examples],
        schema=dg.TableSchema(columns=[dg.TableColumn(column, "string") for column in columns]),
    )


@dataclass(frozen=True)
class CheckDeclaration:
    """One contract or SQL check: its name in errors, its constraints, and the checks that only warn."""

    label: str
    group: ConstraintGroup
    warn_names: frozenset[str]

    def only(self, names: Iterable[str]) -> "CheckDeclaration":
        """Return the same declaration with only the checks of these names."""
        wanted = set(names)
        constraints = [constraint for constraint in self.group.constraints if constraint.name in wanted]
        return replace(self, group=replace(self.group, constraints=constraints))


_declarations: WeakKeyDictionary[Any, tuple[CheckDeclaration, ...]] = WeakKeyDictionary()
"""The declarations of each step, by the step's op. Dagster copies check definitions, but not their op."""


def declarations_in(checks: dg.AssetChecksDefinition) -> tuple[CheckDeclaration, ...]:
    """Return the declarations of `checks`; empty if this package did not build them."""
    names = [spec.name for spec in checks.check_specs]
    return tuple(declaration.only(names) for declaration in _declarations.get(checks.node_def, ()))


def build_check_step(
    name: str,
    key: dg.AssetKey,
    specs: Sequence[dg.AssetCheckSpec],
    declarations: Sequence[CheckDeclaration],
    *,
    description: str,
    kind: str,
) -> dg.AssetChecksDefinition:
    """Build an asset check definition `name` that evaluates all checks in `specs` in one step.

    If checks cannot be evaluated, the step raises CheckFailedToRun at its end, after it has yielded the
    results of the others. `key` is the checked asset. `declarations` are the declared checks that the specs
    belong to. `kind` is the label that Dagster shows on the step.
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
        selected_names = {check.name for check in context.selected_asset_check_keys}
        selected = [
            part
            for declaration in declarations
            if (part := declaration.only(selected_names)).group.constraints
        ]
        view = f"branchlake_this_{name}"
        yield from _iter_results(rows, selected, key, view=view, run_id=context.run.run_id)

    _declarations[checks.node_def] = tuple(declarations)
    return checks


def _iter_results(
    source_rows: DataFrame | StoredRows,
    declarations: Sequence[CheckDeclaration],
    key: dg.AssetKey,
    *,
    view: str,
    run_id: str,
) -> Iterator[dg.AssetCheckResult]:
    column_names = {
        column
        for declaration in declarations
        for constraint in declaration.group.constraints
        for column in constraint.columns
    }
    rows: CheckedRows = (
        TableRows(source_rows, column_names)
        if isinstance(source_rows, StoredRows)
        else FrameRows(source_rows)
    )
    try:
        branch = source_rows.ref if isinstance(source_rows, StoredRows) else find_session_ref(source_rows)
        verdicts = judge_constraints(rows, [part.group for part in declarations], view=view)
    except PySparkException as error:
        labels = " and ".join(part.label for part in declarations)
        raise _build_step_failure(f"{labels} on {key.to_user_string()}", error, run_id) from error
    for declaration in declarations:
        for constraint in declaration.group.constraints:
            if constraint.name in verdicts.outcomes:
                yield build_check_result(
                    constraint.name,
                    constraint.description,
                    verdicts.outcomes[constraint.name],
                    warn=constraint.name in declaration.warn_names,
                    evaluation=_describe_evaluation(constraint, verdicts.outcomes[constraint.name]),
                    branch=branch,
                )
    if verdicts.errors:
        raise _build_failure(verdicts, declarations, key, run_id)


def _build_failure(
    verdicts: Verdicts, declarations: Sequence[CheckDeclaration], key: dg.AssetKey, run_id: str
) -> CheckFailedToRun:
    """Return one error about all checks that could not be evaluated.

    Its message has a line for each distinct cause, with the checks that failed for it. `verdicts.errors` has
    at least one error of a constraint in `declarations`. `key` is the checked asset.
    """
    labels_by_message: dict[str, list[str]] = {}
    for declaration in declarations:
        for constraint in declaration.group.constraints:
            if constraint.name in verdicts.errors:
                error = verdicts.errors[constraint.name]
                message = (
                    format_spark_error(error) if isinstance(error, PySparkException) else _format_error(error)
                )
                label = (
                    declaration.label
                    if isinstance(constraint, SqlConstraint)
                    else f"{constraint.name} of {declaration.label}"
                )
                labels_by_message.setdefault(message, []).append(label)
    asset_name = key.to_user_string()
    messages = [
        f"{', '.join(labels)} on {asset_name} could not be evaluated: {message}"
        for message, labels in labels_by_message.items()
    ]
    failure = CheckFailedToRun("\n".join(messages), run_id=run_id, hint=_HINT)
    failure.__cause__ = next(iter(verdicts.errors.values()))
    return failure


_HINT = "These checks have no verdict, so the run will not be published. All other checks have their verdict."


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _build_step_failure(label: str, error: PySparkException, run_id: str) -> CheckFailedToRun:
    return CheckFailedToRun(
        f"{label} could not be evaluated: {format_spark_error(error)}",
        run_id=run_id,
        hint="The checks have no verdict, so the run will not be published.",
    )


_PROOFS = {
    "metadata": "from the metadata of the data files, no rows read",
    "rows": "on the rows themselves, read without Spark",
}


def _describe_evaluation(constraint: Constraint, outcome: CheckOutcome) -> str:
    if outcome.proof is not None:
        return _PROOFS[outcome.proof.source]
    if isinstance(constraint, SchemaConstraint):
        return "from the schema, no rows read"
    if isinstance(constraint, PanderaConstraint):
        return "by pandera itself, a query of its own, no counts"
    if isinstance(constraint, SqlConstraint):
        return constraint.sql.strip()
    return "in the one Spark job of the asset's checks"
