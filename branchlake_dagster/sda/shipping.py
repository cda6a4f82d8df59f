"""Functions sent to Spark's workers take this package's code with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pyspark import cloudpickle

from branchlake_dagster import sda

F = TypeVar("F", bound=Callable[..., Any])


def carried(function: F) -> F:
    """The function, from now on pickled with the code of `branchlake_dagster.sda` that it calls.

    By default only a module's name is sent, and a worker that does not have the package, or has another
    version of it, fails or computes something else. Workers need numpy, scipy, numba, sgp4, Polars and
    pyarrow.
    Registration is for the process, because Spark Connect pickles when a frame is executed, not here.
    """
    cloudpickle.register_pickle_by_value(sda)  # type: ignore[no-untyped-call]
    return function
