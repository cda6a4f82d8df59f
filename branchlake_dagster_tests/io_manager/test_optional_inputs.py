"""Tests inputs that are annotated with a frame or None."""

from typing import Any, Optional

import dagster as dg
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from branchlake_dagster import table_metadata
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.tables.errors import UnsupportedType
from branchlake_dagster_tests import harness
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

UNCHECKED = table_metadata(require_checks=False)


@pytest.mark.parametrize(
    ("annotation", "loaded_type"),
    [
        (pl.DataFrame | None, pl.DataFrame),
        (Optional[pd.DataFrame], pd.DataFrame),  # noqa: UP045 - both spellings are in use
        (pa.Table | None, pa.Table),
    ],
)
def test_an_optional_frame_is_loaded(lakehouse: Lakehouse, annotation: Any, loaded_type: type) -> None:
    loaded = []

    @dg.asset(metadata=UNCHECKED)
    def price() -> pl.DataFrame:
        return pl.DataFrame({"eur": [1]})

    @dg.asset(metadata=UNCHECKED)
    def copy(price: annotation) -> annotation:
        loaded.append(type(price))
        return price

    with harness.project(lakehouse, price, copy) as p:
        p.settle(p.run())
        assert p.rows("lake", "copy") == [{"eur": 1}]
    assert loaded == [loaded_type]


@pytest.mark.parametrize("annotation", [dict[str, pl.DataFrame], pl.Series | None, list[pl.DataFrame]])
def test_other_annotations_are_refused(lakehouse: Lakehouse, annotation: Any) -> None:
    @dg.asset(metadata=UNCHECKED)
    def price() -> pl.DataFrame:
        return pl.DataFrame({"eur": [1]})

    @dg.asset(metadata=UNCHECKED)
    def copy(price: annotation) -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    with harness.project(lakehouse, price, copy) as p:
        p.run(ok=False)
        p.failed_with(UnsupportedType)
