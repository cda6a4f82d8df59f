"""Whether a file can hold rows of a recorded predicate: by its partition and by the bounds of its columns.

Both answers are inclusive: False is a proof, True is not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from pyiceberg.expressions import (
    AlwaysFalse,
    AlwaysTrue,
    And,
    BooleanExpression,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    Or,
)
from pyiceberg.expressions.visitors import expression_evaluator, inclusive_projection
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.types import DateType, IcebergType, StringType, TimestampType, TimestamptzType

from branchlake_dagster.branching.table.replaced import Among, Condition, Replaced, Slice
from branchlake_dagster.internals.column_metrics import ReliableInclusiveEvaluator

_TYPES: dict[str, tuple[type[IcebergType], ...]] = {
    "string": (StringType,),
    "date": (DateType,),
    "time": (TimestampType, TimestamptzType),
}


def in_partition(predicate: Replaced, schema: Schema, spec: PartitionSpec) -> Callable[[DataFile], bool]:
    """Whether a data file's partition can have rows of the predicate."""
    values = Schema(*spec.partition_type(schema).fields) if spec.fields else None
    if values is None:
        return lambda _: True
    projected = inclusive_projection(schema, spec)(expression(predicate, schema))
    evaluate = expression_evaluator(values, projected, case_sensitive=True)
    return lambda file: bool(evaluate(file.partition))


def in_bounds(predicate: Replaced, schema: Schema) -> Callable[[DataFile], bool]:
    """Whether a data file's bounds leave room for rows of the predicate."""
    evaluator = ReliableInclusiveEvaluator(schema, expression(predicate, schema))
    return lambda file: bool(evaluator.eval(file))


def expression(predicate: Replaced, schema: Schema) -> BooleanExpression:
    """The predicate as PyIceberg's; wider where a column is gone or has another type now."""
    return _balanced([_slice(one, schema) for one in predicate.slices])


def _balanced(parts: list[BooleanExpression]) -> BooleanExpression:
    """Their union as a tree of little depth: visitors recurse."""
    if len(parts) < 2:
        return parts[0] if parts else AlwaysFalse()
    middle = len(parts) // 2
    return Or(_balanced(parts[:middle]), _balanced(parts[middle:]))


def _slice(conditions: Slice, schema: Schema) -> BooleanExpression:
    return reduce(And, (_condition(one, schema) for one in conditions), AlwaysTrue())


def _condition(condition: Condition, schema: Schema) -> BooleanExpression:
    name = schema.find_column_name(condition.column)
    kind = "string" if isinstance(condition, Among) else condition.kind
    if name is None or not isinstance(schema.find_type(name), _TYPES[kind]):
        return AlwaysTrue()
    if isinstance(condition, Among):
        return In(name, condition.values)
    end = LessThanOrEqual if kind == "string" else LessThan
    return And(GreaterThanOrEqual(name, condition.low), end(name, condition.high))
