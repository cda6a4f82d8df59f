"""Tests assets whose table has the name of a namespace, or is in a namespace with the name of a table."""

from __future__ import annotations

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster import table_metadata
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster_tests.harness import project
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


def asset(*key: str) -> dg.AssetsDefinition:
    @dg.asset(key=key, metadata=table_metadata(require_checks=False))
    def rows() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    return rows


@pytest.mark.parametrize("nested_first", [True, False])
def test_a_table_and_a_namespace_of_one_name(
    lakehouse: Lakehouse, namespace: str, nested_first: bool
) -> None:
    table, nested = (namespace, "prices"), (namespace, "prices", "daily")
    first, second = (nested, table) if nested_first else (table, nested)
    with project(lakehouse, asset(*first)) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
    with project(lakehouse, asset(*second)) as p:
        assert p.settle(p.run(ok=False)).state is RunState.DISCARDED
        p.failed_with(ConfigurationError)
        assert lakehouse.catalog().table_exists(first)
        assert not lakehouse.catalog().table_exists(second)
