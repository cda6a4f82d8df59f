"""Ship this package's code with the functions that run on Spark's workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pyspark import cloudpickle

from branchlake_dagster import sda

F = TypeVar("F", bound=Callable[..., Any])


def carried(function: F) -> F:
    """Return the function, after arranging that it is pickled with the code of `branchlake_dagster.sda`.

    By default only a module's name is shipped. A worker without the package, or with another version of it,
    would then fail or compute something else. Workers need numpy, scipy, numba, sgp4, Polars and pyarrow. The
    arrangement holds for the whole process, because Spark Connect pickles when a frame is executed, not here.
    """
    cloudpickle.register_pickle_by_value(sda)  # type: ignore[no-untyped-call]
    return function
