"""Assets that a step skipped: what was not written needs no check, and nothing else is excused."""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster import LakehouseResource, table_metadata
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.tables.errors import TableMissing
from branchlake_dagster_tests.harness import project, retry
from branchlake_dagster_tests.publication.gate.test_writes_after_checks import (
    append_row,
    create_with_row,
)
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

ROWS = pl.DataFrame({"n": [1]})


def check_of(key: dg.AssetKey, other_key: dg.AssetKey | None = None) -> dg.AssetChecksDefinition:
    """A check that reads an asset, and perhaps another one."""
    if other_key is None:

        @dg.asset_check(asset=key, name="read")
        def read(rows: pl.DataFrame) -> dg.AssetCheckResult:
            return dg.AssetCheckResult(passed=True)

        return read

    @dg.asset_check(asset=key, name="read", additional_ins={"other": dg.AssetIn(other_key)})
    def read_both(rows: pl.DataFrame, other: pl.DataFrame) -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    return read_both


@pytest.fixture
def keys(namespace: str) -> tuple[dg.AssetKey, dg.AssetKey]:
    """The assets of a step that writes the first and skips the second."""
    return dg.AssetKey([namespace, "written"]), dg.AssetKey([namespace, "skipped"])


@pytest.fixture
def pair(keys: tuple[dg.AssetKey, dg.AssetKey]) -> dg.AssetsDefinition:
    written, skipped = keys

    @dg.multi_asset(
        outs={"one": dg.AssetOut(key=written), "two": dg.AssetOut(key=skipped, is_required=False)}
    )
    def pair() -> Iterator[dg.Output[pl.DataFrame]]:
        yield dg.Output(ROWS, "one")

    return pair


def test_an_output_that_was_skipped_needs_no_check(
    lakehouse: Lakehouse, namespace: str, keys: tuple[dg.AssetKey, dg.AssetKey], pair: dg.AssetsDefinition
) -> None:
    @dg.asset(key=[namespace, "later"], ins={"rows": dg.AssetIn(keys[1])})
    def later(rows: pl.DataFrame) -> pl.DataFrame:
        return rows

    checks = [check_of(key) for key in (*keys, later.key)]
    with project(lakehouse, pair, later, *checks) as p:
        outcome = p.settle(p.run())
        assert outcome.state is RunState.PUBLISHED
        assert outcome.verdict is not None
        assert (outcome.verdict.checks_passed, outcome.verdict.checks_total) == (1, 1)


def test_a_check_in_the_step_that_skipped_its_asset_is_not_missed(
    lakehouse: Lakehouse, keys: tuple[dg.AssetKey, dg.AssetKey]
) -> None:
    written, _ = keys

    @dg.multi_asset(
        specs=[dg.AssetSpec(key, skippable=True) for key in keys],
        check_specs=[dg.AssetCheckSpec("good", asset=key) for key in keys],
        can_subset=True,
    )
    def pair(lakehouse: LakehouseResource) -> Iterator[dg.MaterializeResult]:
        create_with_row(lakehouse, written, 1)
        result = dg.AssetCheckResult(check_name="good", passed=True, asset_key=written)
        yield dg.MaterializeResult(asset_key=written, check_results=[result])

    with project(lakehouse, pair) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED


def test_an_asset_that_was_skipped_but_whose_table_changed_needs_its_check(
    lakehouse: Lakehouse, keys: tuple[dg.AssetKey, dg.AssetKey]
) -> None:
    written, skipped = keys

    @dg.multi_asset(
        outs={"one": dg.AssetOut(key=written), "two": dg.AssetOut(key=skipped, is_required=False)}
    )
    def pair(lakehouse: LakehouseResource) -> Iterator[dg.Output[pl.DataFrame]]:
        create_with_row(lakehouse, skipped, 1)
        append_row(lakehouse, skipped)
        yield dg.Output(ROWS, "one")

    with project(lakehouse, pair, check_of(written), check_of(skipped)) as p:
        assert "check_not_evaluated" in p.settle(p.run()).codes


def test_a_written_asset_needs_its_check_even_if_the_check_was_skipped(
    lakehouse: Lakehouse, keys: tuple[dg.AssetKey, dg.AssetKey], pair: dg.AssetsDefinition
) -> None:
    written, skipped = keys
    with project(lakehouse, pair, check_of(written, skipped), check_of(skipped)) as p:
        assert p.settle(p.run()).codes == ("check_not_evaluated",)


@pytest.mark.parametrize("in_step", [True, False], ids=["in its step", "in a later step"])
def test_an_asset_that_failed_needs_its_check_although_a_retry_leaves_it_out(
    lakehouse: Lakehouse, namespace: str, in_step: bool
) -> None:
    key = dg.AssetKey([namespace, "second"])
    specs = [dg.AssetCheckSpec("good", asset=key)] if in_step else []

    @dg.asset(key=[namespace, "first"], metadata=table_metadata(require_checks=False))
    def first() -> pl.DataFrame:
        return ROWS

    @dg.asset(key=key, check_specs=specs)
    def second() -> dg.MaterializeResult:
        raise dg.Failure

    with project(lakehouse, first, second, *([] if in_step else [check_of(key)])) as p:
        run = retry(p, p.run(ok=False), f"{namespace}__first")
        assert p.settle(run).codes == ("check_not_evaluated",)


@pytest.mark.parametrize("output", ["none", "no rows", "skipped"])
def test_an_asset_with_nothing_to_write_in_its_first_run(
    lakehouse: Lakehouse, namespace: str, output: str
) -> None:
    @dg.asset(key=[namespace, "arrivals"], output_required=False)
    def arrivals() -> Iterator[dg.Output[pl.DataFrame | None]]:
        if output != "skipped":
            yield dg.Output(None if output == "none" else ROWS.clear())

    @dg.asset(key=[namespace, "other"], metadata=table_metadata(require_checks=False))
    def other() -> pl.DataFrame:
        return ROWS

    with project(lakehouse, arrivals, check_of(arrivals.key), other) as p:
        run = p.run(ok=output != "none")
        if output == "none":
            p.failed_with(TableMissing)
        else:
            outcome = p.settle(run)
            tables = (
                {f"{namespace}.arrivals", f"{namespace}.other"}
                if output == "no rows"
                else {f"{namespace}.other"}
            )
            assert (outcome.state, set(outcome.tables)) == (RunState.PUBLISHED, tables)


def test_an_asset_that_returns_none_is_checked_on_the_rows_that_it_has(
    lakehouse: Lakehouse, namespace: str
) -> None:
    rows: list[pl.DataFrame | None] = [ROWS, None]

    @dg.asset(key=[namespace, "arrivals"])
    def arrivals() -> pl.DataFrame | None:
        return rows.pop(0)

    with project(lakehouse, arrivals, check_of(arrivals.key)) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
        outcome = p.settle(p.run())
        assert (outcome.state, outcome.codes) == (RunState.DISCARDED, ())
        assert len(p.rows(namespace, "arrivals")) == 1
