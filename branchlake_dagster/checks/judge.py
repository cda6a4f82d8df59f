"""Judge all constraints and SQL checks of an asset: without rows, in one Spark job, or through pandera.

Each check gets its own verdict. If the one job fails, it is divided until the checks that cannot be evaluated
are found; the others still get their verdicts.

Checks that cannot be compiled are judged by pandera's own PySpark backend. The verdict is the same, but
without counts, and each check costs at least one Spark job (0.5-2 s on a small table).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from pandera.api.pyspark.container import DataFrameSchema
from pandera.config import ValidationDepth, config_context
from pandera.engines.pyspark_engine import Engine
from pandera.errors import SchemaError, SchemaErrors
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql.types import DataType, StructType

from branchlake_dagster.checks.constraints import (
    CheckOutcome,
    Constraint,
    PanderaConstraint,
    RowConstraint,
    SchemaConstraint,
    SqlConstraint,
    UniqueConstraint,
    require_examples,
)
from branchlake_dagster.checks.counting import (
    ANY_ROW,
    ROWS_PLACEHOLDER,
    Collect,
    Countable,
    FailureCount,
    collect_examples,
    collect_rows,
    count_failures,
    find_failing_partitions,
    select_failures,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from branchlake_dagster.io_manager.loading import RowPartitions


class CheckedRows(Protocol):
    """The rows to check. Only access to `frame` may start Spark, as far as this can be avoided."""

    @property
    def schema(self) -> StructType:
        """The columns and their types in Spark."""

    @property
    def frame(self) -> DataFrame:
        """The rows in Spark, read lazily."""

    @property
    def partitions(self) -> RowPartitions | None:
        """The partitions definition of the rows, with the column of each dimension.

        None if all rows belong to one partition, if the asset has no partition columns, or if the partitions
        are unknown.
        """

    def prove(self, constraint: Constraint) -> CheckOutcome | None:
        """Return a passed outcome if the constraint is proved without Spark; None if Spark has to decide."""


class FrameRows:
    """`CheckedRows` of which only a Spark frame is known, so Spark must judge all row constraints."""

    def __init__(self, frame: DataFrame) -> None:
        self._frame = frame

    @property
    def schema(self) -> StructType:
        """The schema of the frame. The Spark server analyzes the frame for it."""
        return self._frame.schema

    @property
    def frame(self) -> DataFrame:
        """The Spark frame."""
        return self._frame

    @property
    def partitions(self) -> RowPartitions | None:
        """Always None: the partitions of the rows of a frame are unknown."""
        return None

    def prove(self, constraint: Constraint) -> CheckOutcome | None:  # noqa: ARG002 - the protocol has it
        """Always return None for any constraint: nothing can be proved about a frame without Spark."""
        return None


def schema_outcome(schema: DataFrameSchema, actual: StructType) -> CheckOutcome:
    """Compare the actual schema with the contract. If they differ, the outcome's note lists all differences.

    Covers pandera's column presence, dtype, `strict`, `ordered` and `unique_column_names`.
    """
    problems = [*_column_problems(schema, actual.names), *find_wrong_types(schema, actual).values()]
    return CheckOutcome(passed=not problems, note="; ".join(problems) or None)


def find_wrong_types(schema: DataFrameSchema, actual: StructType) -> dict[str, str]:
    """Return a message for each column whose type differs from the contract, by column name; {} if none does.

    `actual` is the schema of the checked rows. Columns that it lacks, columns that the contract names by a
    regular expression, and columns without a declared type are omitted.
    """
    problems = {}
    for name, column in schema.columns.items():
        expected_dtype = schema.dtype or column.dtype
        if expected_dtype is None or column.regex or name not in actual.names:
            continue
        actual_type = actual[name].dataType
        if not _is_same_type(expected_dtype, actual_type):
            expected_type = expected_dtype.type.simpleString()
            problems[name] = (
                f"column {name} has type {actual_type.simpleString()}, the contract says {expected_type}"
            )
    return problems


def _is_same_type(expected_dtype: object, actual_type: DataType) -> bool:
    try:
        return bool(expected_dtype.check(Engine.dtype(actual_type)))  # type: ignore[attr-defined]
    except TypeError:  # pandera does not know the type, so it only equals itself
        return getattr(expected_dtype, "type", None) == actual_type


def _column_problems(schema: DataFrameSchema, names: Sequence[str]) -> list[str]:
    plain_names = [name for name, column in schema.columns.items() if not column.regex]
    patterns = [re.compile(name) for name, column in schema.columns.items() if column.regex]
    problems = [
        f"column {name} is missing"
        for name in plain_names
        if schema.columns[name].required and name not in names
    ]
    if schema.strict:
        problems += [
            f"column {name} is not in the contract"
            for name in names
            if name not in plain_names and not any(pattern.match(name) for pattern in patterns)
        ]
    if schema.ordered and [name for name in names if name in plain_names] != [
        name for name in plain_names if name in names
    ]:
        problems.append(f"columns are not in the contract's order: {', '.join(names)}")
    if schema.unique_column_names and len(set(names)) < len(names):
        problems.append("a column name occurs twice")
    return problems


_NOTE_CHARS = 500


def validate_with_pandera(rows: DataFrame, constraint: PanderaConstraint) -> CheckOutcome:
    """Return pandera's verdict on `constraint` alone, without counts or examples.

    A check that raises an exception counts as failed, as in pandera for most exceptions. The note contains
    the message.
    """
    # With PANDERA_VALIDATION_ENABLED=False pandera returns at once without errors, which would mean "passed".
    # So the verdict must not depend on the environment.
    with config_context(
        validation_enabled=True, validation_depth=ValidationDepth.SCHEMA_AND_DATA, cache_dataframe=False
    ):
        try:
            result_frame = constraint.schema.validate(rows, lazy=True)
            errors = list(_iter_messages(result_frame.pandera.errors or {}))
        except (SchemaError, SchemaErrors, PySparkException, TypeError, ValueError) as error:
            errors = [f"{type(error).__name__}: {error}"]
    return CheckOutcome(passed=not errors, note="; ".join(errors)[:_NOTE_CHARS] or None)


def _iter_messages(errors: Mapping[str, Any]) -> Iterator[str]:
    """Yield the messages of pandera's report, which maps category -> reason -> records with `error`."""
    for reasons in errors.values():
        for records in reasons.values():
            for record in records:
                yield str(record.get("error") or record)


if TYPE_CHECKING:
    from pandera.api.pyspark.container import DataFrameSchema
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from branchlake_dagster.checks.constraints import Example, FailingPartitions

_CONNECTION_ERRORS = frozenset({"SparkConnectGrpcException", "SparkConnectException", "RetriesExceeded"})
"""Class names of connection errors. They do not depend on the query, so dividing it would not help."""


@dataclass(frozen=True)
class ConstraintGroup:
    """Constraints of one contract, with the number of `examples` to show for each.

    `schema` is None for SQL checks, which do not belong to a contract.
    """

    schema: DataFrameSchema | None
    constraints: Sequence[Constraint]
    examples: int

    def __post_init__(self) -> None:
        require_examples(self.examples)


@dataclass
class Verdicts:
    """The outcomes of constraints, and the errors of those that could not be evaluated, by name.

    Each judged constraint is in exactly one of them.
    """

    outcomes: dict[str, CheckOutcome] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)


def judge_constraints(
    rows: CheckedRows, groups: Sequence[ConstraintGroup], *, view: str, collect: Collect = collect_rows
) -> Verdicts:
    """Return the verdicts on all constraints of `groups`. Constraint names must be unique.

    The steps are: judge the schema; prove constraints without Spark; count failing rows of the others with
    one call of `collect` (if none is left, Spark is not opened); load examples for failures; find the
    partitions of failing rows if `rows` have several; judge the rest with pandera. `view` is the name of the
    temporary view for `{this}`. A constraint on a missing or wrongly typed column fails, and its note says
    so.
    """
    verdicts = Verdicts()
    countable: dict[str, Countable] = {}
    example_limits: dict[str, int] = {}
    for group in groups:
        example_limits |= dict.fromkeys((constraint.name for constraint in group.constraints), group.examples)
        countable |= _judge_without_reading(rows, group, verdicts)
    if countable:
        _count_in_one_job(rows, countable, example_limits, verdicts, view=view, collect=collect)
    for group in groups:
        for constraint in group.constraints:
            if isinstance(constraint, PanderaConstraint):
                try:
                    verdicts.outcomes[constraint.name] = validate_with_pandera(rows.frame, constraint)
                except Exception as error:  # noqa: BLE001 - the check's own code may raise anything
                    verdicts.errors[constraint.name] = error
    return verdicts


def _judge_without_reading(
    rows: CheckedRows, group: ConstraintGroup, verdicts: Verdicts
) -> dict[str, Countable]:
    """Record the verdicts on constraints that need no Spark; return the other constraints by name.

    Constraints for pandera are in neither.
    """
    remaining: dict[str, Countable] = {}
    type_problems = find_wrong_types(group.schema, rows.schema) if group.schema is not None else {}
    for constraint in group.constraints:
        if isinstance(constraint, SchemaConstraint):
            verdicts.outcomes[constraint.name] = schema_outcome(constraint.schema, rows.schema)
        elif isinstance(constraint, SqlConstraint):
            remaining[constraint.name] = constraint
        elif isinstance(constraint, RowConstraint | UniqueConstraint):
            try:
                outcome = _outcome_from_schema(rows, constraint, rows.schema, type_problems) or rows.prove(
                    constraint
                )
            except Exception as error:  # noqa: BLE001 - a rule's own code may raise anything
                verdicts.errors[constraint.name] = error
                continue
            if outcome is None:
                remaining[constraint.name] = constraint
            else:
                verdicts.outcomes[constraint.name] = outcome
    return remaining


def _outcome_from_schema(
    rows: CheckedRows,
    constraint: RowConstraint | UniqueConstraint,
    schema: StructType,
    type_problems: Mapping[str, str],
) -> CheckOutcome | None:
    """Return the outcome of a constraint if the schema determines it, else None.

    It does if a column is missing, occurs twice or has a wrong type.
    """
    names = schema.names
    missing_columns = [column for column in constraint.columns if column not in names]
    if missing_columns and constraint.optional:
        return CheckOutcome(passed=True, note=f"optional column {', '.join(missing_columns)} is absent")
    if missing_columns:
        return _not_evaluated(f"column {', '.join(missing_columns)} is missing")
    duplicates = [column for column in constraint.columns if list(names).count(column) > 1]
    if duplicates:
        return _not_evaluated(f"column {', '.join(duplicates)} occurs twice")
    if not isinstance(constraint, RowConstraint):
        return None
    problems = [type_problems[column] for column in constraint.columns if column in type_problems]
    if constraint.needs_types and problems:
        return _not_evaluated("; ".join(problems))
    if not constraint.columns:
        # It is unknown which columns a rule on whole rows reads. Analyzing it (some ms, no job) shows whether
        # it can run, before it makes the one job fail for all other constraints.
        try:
            _ = rows.frame.select(constraint.build_condition(rows.frame)).schema
        except AnalysisException as error:
            return _not_evaluated(str(error).partition("\n")[0])
    return None


def _not_evaluated(reason: str) -> CheckOutcome:
    return CheckOutcome(passed=False, note=f"not evaluated: {reason}")


def _count_in_one_job(
    rows: CheckedRows,
    countable: Mapping[str, Countable],
    example_limits: Mapping[str, int],
    verdicts: Verdicts,
    *,
    view: str,
    collect: Collect,
) -> None:
    """Count the failing rows of all `countable` constraints, and record the outcomes in `verdicts`.

    Loads examples and partitions of failing rows for those that fail. `view` is the temporary view of the
    rows for SQL checks. `collect` runs a Spark query and returns its rows.
    """
    frame = rows.frame
    uses_view = any(
        isinstance(constraint, SqlConstraint) and ROWS_PLACEHOLDER in constraint.sql
        for constraint in countable.values()
    )
    if uses_view:
        frame.createOrReplaceTempView(view)
    try:
        counts = _count_by_halves(
            list(countable.values()),
            lambda constraints: count_failures(frame, constraints, view=view, collect=collect),
            verdicts.errors,
        )
        failing = [
            constraint
            for constraint in countable.values()
            if constraint.name in counts and counts[constraint.name].failing
        ]
        examples_by_name, notes = _load_examples(frame, failing, example_limits, view=view, collect=collect)
        partitions_by_name = _load_failing_partitions(rows, failing, view=view, collect=collect)
    finally:
        if uses_view:
            frame.sparkSession.catalog.dropTempView(view)
    for name, failure_count in counts.items():
        verdicts.outcomes[name] = replace(
            _count_outcome(failure_count),
            examples=examples_by_name.get(name, ()),
            note=notes.get(name),
            partitions=partitions_by_name.get(name),
        )


def _count_outcome(failure_count: FailureCount) -> CheckOutcome:
    return CheckOutcome(
        passed=failure_count.failing == 0, failing=failure_count.failing, total=failure_count.total
    )


def _count_by_halves(
    constraints: Sequence[Countable],
    count_together: Callable[[Sequence[Countable]], dict[str, FailureCount]],
    errors: dict[str, Exception],
) -> dict[str, FailureCount]:
    """Return the counts of all constraints that can be counted; add the errors of the others to `errors`.

    If the one query fails, each half of the constraints is counted separately, and so on, until the
    constraints that fail are isolated. After a connection error, nothing is divided.
    """
    try:
        return count_together(constraints)
    except Exception as error:  # noqa: BLE001 - a rule's own code may raise anything
        if len(constraints) == 1 or type(error).__name__ in _CONNECTION_ERRORS:
            errors |= dict.fromkeys((constraint.name for constraint in constraints), error)
            return {}
        middle = len(constraints) // 2
        return _count_by_halves(constraints[:middle], count_together, errors) | _count_by_halves(
            constraints[middle:], count_together, errors
        )


def _load_examples(
    frame: DataFrame,
    failing: Sequence[Countable],
    example_limits: Mapping[str, int],
    *,
    view: str,
    collect: Collect,
) -> tuple[dict[str, tuple[Example, ...]], dict[str, str]]:
    """Return example rows of failing constraints by name, and by name a note if they cannot be loaded.

    An error here does not change the verdicts. `view` is the temporary view of the rows for SQL checks.
    `collect` runs a Spark query and returns its rows.
    """
    examples_by_name: dict[str, tuple[Example, ...]] = {}
    notes: dict[str, str] = {}
    row_constraints = [constraint for constraint in failing if not isinstance(constraint, SqlConstraint)]
    if row_constraints:
        limit = max(example_limits[constraint.name] for constraint in row_constraints)
        try:
            new_examples = collect_examples(frame, row_constraints, examples=limit, collect=collect)
            examples_by_name |= {name: rows[: example_limits[name]] for name, rows in new_examples.items()}
        except PySparkException as error:
            names = (constraint.name for constraint in row_constraints)
            notes |= dict.fromkeys(names, _no_examples_note(error))
    for constraint in failing:
        if isinstance(constraint, SqlConstraint):
            try:
                failing_rows = select_failures(frame, constraint, view)
                new_examples = collect_examples(
                    failing_rows, [ANY_ROW], examples=example_limits[constraint.name], collect=collect
                )
                examples_by_name[constraint.name] = new_examples[ANY_ROW.name]
            except PySparkException as error:
                notes[constraint.name] = _no_examples_note(error)
    return examples_by_name, notes


def _load_failing_partitions(
    rows: CheckedRows, failing: Sequence[Countable], *, view: str, collect: Collect
) -> dict[str, FailingPartitions]:
    """Return the partitions of the failing rows by constraint name.

    An error here only omits them; it does not change the verdicts. `view` is the temporary view of the rows
    for SQL checks. `collect` runs a Spark query and returns its rows.
    """
    if rows.partitions is None:
        return {}
    partitions_by_name: dict[str, FailingPartitions] = {}
    row_constraints = [constraint for constraint in failing if not isinstance(constraint, SqlConstraint)]
    with contextlib.suppress(PySparkException):
        partitions_by_name |= find_failing_partitions(
            rows.frame, row_constraints, rows.partitions, collect=collect
        )
    for constraint in failing:
        if isinstance(constraint, SqlConstraint):
            with contextlib.suppress(PySparkException):
                failing_rows = select_failures(rows.frame, constraint, view)
                sql_partitions = find_failing_partitions(
                    failing_rows, [ANY_ROW], rows.partitions, collect=collect
                )
                if ANY_ROW.name in sql_partitions:
                    partitions_by_name[constraint.name] = sql_partitions[ANY_ROW.name]
    return partitions_by_name


def _no_examples_note(error: PySparkException) -> str:
    return f"no examples: {str(error).strip().splitlines()[0]}"
