"""All constraints and SQL checks of an asset: what needs no rows, the one job, the fallbacks.

Each gets its own verdict: what cannot be evaluated is found by dividing the one job, and leaves the others
theirs.

What cannot be compiled is judged by pandera's own PySpark backend: same verdict, no counts.

One Spark job or more per constraint (0.5-2 s each on a small table), which is why it is the fallback.
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
    Constraint,
    Outcome,
    PanderaConstraint,
    RowConstraint,
    SchemaConstraint,
    SqlConstraint,
    UniqueConstraint,
    require_examples,
)
from branchlake_dagster.checks.counting import (
    ANY_ROW,
    THIS,
    Collect,
    Count,
    Countable,
    collect_rows,
    count,
    examples_of,
    failing_partitions,
    returned,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from branchlake_dagster.io_manager.loading import RowPartitions


class Rows(Protocol):
    """What a contract is held against. `frame` may start Spark; nothing else does where it can be avoided."""

    @property
    def schema(self) -> StructType:
        """Columns and types as Spark has them."""

    @property
    def frame(self) -> DataFrame:
        """The rows in Spark, read lazily."""

    @property
    def partitions(self) -> RowPartitions | None:
        """How the rows belong to several partitions of their asset; None if that is not known."""

    def proved(self, constraint: Constraint) -> Outcome | None:
        """The outcome of a constraint that holds and that no row need be read for; None: read the rows."""


class FrameRows:
    """Rows that are known as a Spark frame and as nothing else."""

    def __init__(self, frame: DataFrame) -> None:
        self._frame = frame

    @property
    def schema(self) -> StructType:
        """Asked of the server, which analyses the frame."""
        return self._frame.schema

    @property
    def frame(self) -> DataFrame:
        """The frame."""
        return self._frame

    @property
    def partitions(self) -> RowPartitions | None:
        """A frame does not say of which partitions it is."""
        return None

    def proved(self, constraint: Constraint) -> Outcome | None:  # noqa: ARG002 - the protocol's
        """Nothing is known without reading."""
        return None


def schema_outcome(schema: DataFrameSchema, actual: StructType) -> Outcome:
    """Passed when `actual` has the contract's columns in the contract's types; the note lists breaches.

    Covers what pandera calls column presence, dtype, `strict`, `ordered` and `unique_column_names`.
    """
    problems = [*_presence(schema, actual.names), *wrong_types(schema, actual).values()]
    return Outcome(passed=not problems, note="; ".join(problems) or None)


def wrong_types(schema: DataFrameSchema, actual: StructType) -> dict[str, str]:
    """By column name, what is wrong with the type of each present column."""
    wrong = {}
    for name, column in schema.columns.items():
        expected = schema.dtype or column.dtype
        if expected is None or column.regex or name not in actual.names:
            continue
        found = actual[name].dataType
        if not _same_type(expected, found):
            promised = expected.type.simpleString()
            wrong[name] = f"column {name} has type {found.simpleString()}, the contract says {promised}"
    return wrong


def _same_type(expected: object, found: DataType) -> bool:
    try:
        return bool(expected.check(Engine.dtype(found)))  # type: ignore[attr-defined]
    except TypeError:  # a type pandera has no word for: equal only to itself
        return getattr(expected, "type", None) == found


def _presence(schema: DataFrameSchema, names: Sequence[str]) -> list[str]:
    plain = [name for name, column in schema.columns.items() if not column.regex]
    patterns = [re.compile(name) for name, column in schema.columns.items() if column.regex]
    problems = [
        f"column {name} is missing" for name in plain if schema.columns[name].required and name not in names
    ]
    if schema.strict:
        problems += [
            f"column {name} is not in the contract"
            for name in names
            if name not in plain and not any(pattern.match(name) for pattern in patterns)
        ]
    if schema.ordered and [name for name in names if name in plain] != [
        name for name in plain if name in names
    ]:
        problems.append(f"columns are not in the contract's order: {', '.join(names)}")
    if schema.unique_column_names and len(set(names)) < len(names):
        problems.append("a column name occurs twice")
    return problems


_NOTE_CHARS = 500


def validate(rows: DataFrame, constraint: PanderaConstraint) -> Outcome:
    """Pandera's verdict on `constraint` alone, without counts or examples.

    A check that raises is a failed check, as pandera has it for most exceptions; its words are the note.
    """
    # PANDERA_VALIDATION_ENABLED=False makes pandera return at once with no errors. That would read as
    # "passed", so the answer may not depend on the environment.
    with config_context(
        validation_enabled=True, validation_depth=ValidationDepth.SCHEMA_AND_DATA, cache_dataframe=False
    ):
        try:
            checked = constraint.schema.validate(rows, lazy=True)
            errors = list(_messages(checked.pandera.errors or {}))
        except (SchemaError, SchemaErrors, PySparkException, TypeError, ValueError) as error:
            errors = [f"{type(error).__name__}: {error}"]
    return Outcome(passed=not errors, note="; ".join(errors)[:_NOTE_CHARS] or None)


def _messages(errors: Mapping[str, Any]) -> Iterator[str]:
    """The texts in pandera's report: category to reason to a list of records with `error`."""
    for reasons in errors.values():
        for records in reasons.values():
            for record in records:
                yield str(record.get("error") or record)


if TYPE_CHECKING:
    from pandera.api.pyspark.container import DataFrameSchema
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from branchlake_dagster.checks.constraints import Example, FailingPartitions

_NO_ANSWER = frozenset({"SparkConnectGrpcException", "SparkConnectException", "RetriesExceeded"})
"""Errors of the connection, by their very class: what is asked has no part in them."""


@dataclass(frozen=True)
class Asked:
    """Constraints that are judged together, by the contract they come from, and `examples` to show of each.

    `schema` None: SQL checks, which belong to no contract.
    """

    schema: DataFrameSchema | None
    constraints: Sequence[Constraint]
    examples: int

    def __post_init__(self) -> None:
        require_examples(self.examples)


@dataclass
class Verdicts:
    """By name: what was found, and why nothing could be. What was asked is in one of them."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    broken: dict[str, Exception] = field(default_factory=dict)


def judge(rows: Rows, asked: Sequence[Asked], *, view: str, collect: Collect = collect_rows) -> Verdicts:
    """The verdicts on all that is asked; names occur once.

    In this order: the schema, what `rows` know without being read, one call of `collect` for all that can
    be counted (none when nothing is left, then Spark is not even opened), one more for examples where
    something fails, another for the partitions of failing rows if `rows` are of several, and pandera for the
    rest. `view` is what `{this}` is called in the session meanwhile. A constraint on a missing or wrongly
    typed column fails and says so.
    """
    verdicts = Verdicts()
    countable: dict[str, Countable] = {}
    examples: dict[str, int] = {}
    for part in asked:
        examples |= dict.fromkeys((one.name for one in part.constraints), part.examples)
        countable |= _without_reading(rows, part, verdicts)
    if countable:
        _in_one_job(rows, countable, examples, verdicts, view=view, collect=collect)
    for part in asked:
        for constraint in part.constraints:
            if isinstance(constraint, PanderaConstraint):
                try:
                    verdicts.outcomes[constraint.name] = validate(rows.frame, constraint)
                except Exception as error:  # noqa: BLE001 - it is the check's own code that raised it
                    verdicts.broken[constraint.name] = error
    return verdicts


def _without_reading(rows: Rows, part: Asked, verdicts: Verdicts) -> dict[str, Countable]:
    """Judge what needs no rows; the rest by name."""
    rest: dict[str, Countable] = {}
    wrong = wrong_types(part.schema, rows.schema) if part.schema is not None else {}
    for one in part.constraints:
        if isinstance(one, SchemaConstraint):
            verdicts.outcomes[one.name] = schema_outcome(one.schema, rows.schema)
        elif isinstance(one, SqlConstraint):
            rest[one.name] = one
        elif isinstance(one, RowConstraint | UniqueConstraint):
            try:
                early = _from_schema(rows, one, rows.schema, wrong) or rows.proved(one)
            except Exception as error:  # noqa: BLE001 - a rule's own code may raise anything
                verdicts.broken[one.name] = error
                continue
            if early is None:
                rest[one.name] = one
            else:
                verdicts.outcomes[one.name] = early
    return rest


def _from_schema(
    rows: Rows,
    constraint: RowConstraint | UniqueConstraint,
    schema: StructType,
    wrong: Mapping[str, str],
) -> Outcome | None:
    """The outcome when it can be told from the schema, else None."""
    names = schema.names
    missing = [column for column in constraint.columns if column not in names]
    if missing and constraint.optional:
        return Outcome(passed=True, note=f"optional column {', '.join(missing)} is absent")
    if missing:
        return _not_evaluated(f"column {', '.join(missing)} is missing")
    twice = [column for column in constraint.columns if list(names).count(column) > 1]
    if twice:
        return _not_evaluated(f"column {', '.join(twice)} occurs twice")
    if not isinstance(constraint, RowConstraint):
        return None
    mistyped = [wrong[column] for column in constraint.columns if column in wrong]
    if constraint.typed and mistyped:
        return _not_evaluated("; ".join(mistyped))
    if not constraint.columns:
        # Nobody knows which columns a rule on whole rows reads. Its analysis (some ms, no job) tells
        # whether it can run, before it fails the one job for every other constraint.
        try:
            _ = rows.frame.select(constraint.holds(rows.frame)).schema
        except AnalysisException as error:
            return _not_evaluated(str(error).partition("\n")[0])
    return None


def _not_evaluated(why: str) -> Outcome:
    return Outcome(passed=False, note=f"not evaluated: {why}")


def _in_one_job(
    rows: Rows,
    wanted: Mapping[str, Countable],
    examples: Mapping[str, int],
    verdicts: Verdicts,
    *,
    view: str,
    collect: Collect,
) -> None:
    """Count all of `wanted`, then show rows of what fails, and their partitions."""
    frame = rows.frame
    uses_view = any(isinstance(one, SqlConstraint) and THIS in one.sql for one in wanted.values())
    if uses_view:
        frame.createOrReplaceTempView(view)
    try:
        counts = _divided(
            list(wanted.values()),
            lambda some: count(frame, some, view=view, collect=collect),
            verdicts.broken,
        )
        failing = [one for one in wanted.values() if one.name in counts and counts[one.name].failing]
        shown, why = _shown(frame, failing, examples, view=view, collect=collect)
        places = _places(rows, failing, view=view, collect=collect)
    finally:
        if uses_view:
            frame.sparkSession.catalog.dropTempView(view)
    for name, found in counts.items():
        verdicts.outcomes[name] = replace(
            _outcome(found), examples=shown.get(name, ()), note=why.get(name), partitions=places.get(name)
        )


def _outcome(found: Count) -> Outcome:
    return Outcome(passed=found.failing == 0, failing=found.failing, total=found.total)


def _divided(
    wanted: Sequence[Countable],
    ask: Callable[[Sequence[Countable]], dict[str, Count]],
    broken: dict[str, Exception],
) -> dict[str, Count]:
    """The counts of all that can be counted; the others are `broken`, each with its own error.

    One that Spark refuses, or that fails on some row, is found by halves: a few queries more.
    """
    try:
        return ask(wanted)
    except Exception as error:  # noqa: BLE001 - a rule's own code may raise anything
        if len(wanted) == 1 or type(error).__name__ in _NO_ANSWER:
            broken |= dict.fromkeys((one.name for one in wanted), error)
            return {}
        middle = len(wanted) // 2
        return _divided(wanted[:middle], ask, broken) | _divided(wanted[middle:], ask, broken)


def _shown(
    frame: DataFrame,
    failing: Sequence[Countable],
    examples: Mapping[str, int],
    *,
    view: str,
    collect: Collect,
) -> tuple[dict[str, tuple[Example, ...]], dict[str, str]]:
    """Rows of each of `failing`, and where there are none why. The verdicts stand whatever happens here."""
    shown: dict[str, tuple[Example, ...]] = {}
    why: dict[str, str] = {}
    promises = [one for one in failing if not isinstance(one, SqlConstraint)]
    if promises:
        most = max(examples[one.name] for one in promises)
        try:
            found = examples_of(frame, promises, examples=most, collect=collect)
            shown |= {name: rows[: examples[name]] for name, rows in found.items()}
        except PySparkException as error:
            why |= dict.fromkeys((one.name for one in promises), _no_examples(error))
    for one in failing:
        if isinstance(one, SqlConstraint):
            try:
                bad = returned(frame, one, view)
                found = examples_of(bad, [ANY_ROW], examples=examples[one.name], collect=collect)
                shown[one.name] = found[ANY_ROW.name]
            except PySparkException as error:
                why[one.name] = _no_examples(error)
    return shown, why


def _places(
    rows: Rows, failing: Sequence[Countable], *, view: str, collect: Collect
) -> dict[str, FailingPartitions]:
    """The partitions of the failing rows, by constraint. The verdicts stand whatever happens here."""
    if rows.partitions is None:
        return {}
    found: dict[str, FailingPartitions] = {}
    promises = [one for one in failing if not isinstance(one, SqlConstraint)]
    with contextlib.suppress(PySparkException):
        found |= failing_partitions(rows.frame, promises, rows.partitions, collect=collect)
    for one in failing:
        if isinstance(one, SqlConstraint):
            with contextlib.suppress(PySparkException):
                bad = returned(rows.frame, one, view)
                placed = failing_partitions(bad, [ANY_ROW], rows.partitions, collect=collect)
                if ANY_ROW.name in placed:
                    found[one.name] = placed[ANY_ROW.name]
    return found


def _no_examples(error: PySparkException) -> str:
    return f"no examples: {str(error).strip().splitlines()[0]}"
