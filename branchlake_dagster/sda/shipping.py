"""Ship this package's code with the functions that run on Spark's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import update_wrapper
from typing import Any, TypeVar, cast
from weakref import WeakSet

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from branchlake_dagster import errors, sda, wording

F = TypeVar("F", bound=Callable[..., Any])
_NO_LIMIT = (1 << 31) - 1
_unlimited_sessions: WeakSet[SparkSession] = WeakSet()
"""Sessions whose batches for workers have no byte limit."""
BatchFunction = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def pickle_by_value(function: F) -> F:
    """Return the function in a form that is pickled with the code of `branchlake_dagster.sda`.

    By default only a module's name is shipped. A worker without the package, or with another version of it,
    would then fail or compute something else. Workers need numpy, scipy, numba, sgp4, pyerfa, Polars and
    pyarrow.

    This call pickles the function, with the objects that it holds (in its closure, or as arguments of a
    `partial`). Later changes of these objects have no effect on the workers.
    """
    for module in (sda, errors, wording):  # errors of this package derive from classes in the latter two
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return cast("F", _CarriedFunction(function))


def map_in_arrow(frame: DataFrame, function: BatchFunction, schema: pa.Schema) -> DataFrame:
    """Apply a function of `branchlake_dagster.sda` to the Arrow batches of a frame on Spark's workers.

    `schema` is that of the result. The function is shipped by `pickle_by_value`. Sets no byte limit for the
    batches that the session sends from now on: a batch has at most 10,000 rows. The pipeline's rows are
    small, and those with whole files are spread over the partitions. Counting the bytes took 8 to 20 % of the
    registry's merge.
    """
    session = frame.sparkSession
    if session not in _unlimited_sessions:
        session.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", str(_NO_LIMIT))
        _unlimited_sessions.add(session)
    return frame.mapInArrow(pickle_by_value(function), from_arrow_schema(schema))


class _CarriedFunction:
    """A function that is pickled once, so that each request to Spark has the same bytes.

    Spark finds persisted rows by comparing plans, with the bytes of their functions. Without this class the
    bytes of a function may change between two requests: the first pickled object of a class adds
    ``__slotnames__`` to the class, which is pickled with its code.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self._function = function
        self._pickled = cloudpickle.dumps(function)  # type: ignore[no-untyped-call]

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        return cloudpickle.loads, (self._pickled,)
