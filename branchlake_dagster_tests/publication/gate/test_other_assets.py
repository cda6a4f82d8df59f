"""Materializations of a run that change no table of the lake: they neither block the run, nor open the gate."""

from typing import Any

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest

from branchlake_dagster import LakehouseResource, table_metadata
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs.run_tags import RunState
from branchlake_dagster.stored_names import EventMetadata
from branchlake_dagster_tests.harness import Project, project
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse

FREE = table_metadata(require_checks=False)
URL = "https://example.com/board?page=1"


@pytest.fixture(params=[True, False], ids=["checks required", "free"])
def lake(request: pytest.FixtureRequest, lakehouse: Lakehouse) -> Lakehouse:
    return Lakehouse(lakehouse.settings.model_copy(update={"require_checks": request.param}))


RESOURCES = {"outside": dg.mem_io_manager}


def outside(*path: str) -> dg.AssetsDefinition:
    """An asset that is not in the lake."""

    @dg.multi_asset(outs={"page": dg.AssetOut(key=path, io_manager_key="outside")})
    def page() -> int:
        return 7

    return page


def checked(namespace: str, metadata: dict[str, Any] | None = None) -> tuple[Any, Any]:
    @dg.asset(key=[namespace, "t"], metadata=metadata)
    def t() -> pl.DataFrame:
        return pl.DataFrame({"n": [7]})

    @dg.asset_check(asset=t)
    def good(t: pl.DataFrame) -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=t["n"].to_list() == [7])

    return t, good


def without_checks(p: Project) -> str:
    """The run id of a run of all assets that leaves all checks out."""
    job = p.definitions.resolve_implicit_global_asset_job_def()
    result = job.get_subset(
        asset_selection={*job.asset_layer.executable_asset_keys}, asset_check_selection=set()
    ).execute_in_process(instance=p.instance)
    assert not result.get_asset_check_evaluations()
    return result.run_id


@pytest.mark.parametrize("key", [["dashboard"], ["board", URL], ["a", "user@x"], ["", "b"]], ids=str)
def test_an_event_of_an_asset_that_is_defined_nowhere_changes_no_verdict(
    lake: Lakehouse, namespace: str, key: list[str]
) -> None:
    @dg.asset(key=[namespace, "t"], metadata=FREE)
    def t(context: dg.AssetExecutionContext) -> pl.DataFrame:
        context.log_event(dg.AssetMaterialization(dg.AssetKey(key)))
        return pl.DataFrame({"n": [1]})

    with project(lake, t) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
        assert p.rows(namespace, "t") == [{"n": 1}]


@pytest.mark.parametrize("part", ["elsewhere", URL])
def test_an_asset_of_another_io_manager_changes_no_verdict(
    lake: Lakehouse, namespace: str, part: str
) -> None:
    with project(lake, *checked(namespace), outside(namespace, part), resources=RESOURCES) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
        assert p.rows(namespace, "t") == [{"n": 7}]


def test_no_rows_are_reported_for_an_asset_of_another_io_manager(lake: Lakehouse, namespace: str) -> None:
    def counts(*parts: str) -> list[object]:
        return [
            report.metadata[EventMetadata.TABLE_ROWS].value
            for report in p.observations(parts)
            if EventMetadata.TABLE_ROWS in report.metadata
        ]

    t, good = checked(namespace)
    with project(lake, t, good, outside(namespace, "elsewhere"), resources=RESOURCES) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
        assert p.settle(without_checks(p)).state is RunState.BLOCKED
        assert len(p.observations([namespace, "elsewhere"])) == 2
        assert counts(namespace, "elsewhere") == []
        assert counts(namespace, "t") == [1, 1]


def test_inputs_of_assets_and_of_checks_need_not_be_tables(lake: Lakehouse, namespace: str) -> None:
    @dg.asset(key=[namespace, "t"], ins={"page": dg.AssetIn(["web", URL])})
    def t(page: int) -> pl.DataFrame:
        return pl.DataFrame({"n": [page]})

    @dg.asset_check(asset=t, additional_ins={"page": dg.AssetIn(["web", URL])})
    def good(t: pl.DataFrame, page: int) -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=t["n"].to_list() == [page])

    with project(lake, outside("web", URL), t, good, resources=RESOURCES) as p:
        assert p.settle(p.run()).state is RunState.PUBLISHED
        assert p.rows(namespace, "t") == [{"n": 7}]


# -- the gate stays closed ------------------------------------------------------------------------------


def test_a_check_that_was_left_out_blocks_beside_other_assets(lake: Lakehouse, namespace: str) -> None:
    with project(lake, *checked(namespace), outside(namespace, "elsewhere"), resources=RESOURCES) as p:
        outcome = p.settle(without_checks(p))
        assert outcome.state is RunState.BLOCKED
        assert outcome.codes == ("check_left_out",)


def test_a_written_table_whose_asset_is_defined_no_more_is_not_published(
    lake: Lakehouse, namespace: str
) -> None:
    t, _ = checked(namespace, FREE)
    with project(lake, t) as p, project(lake) as without_assets:
        run_id = p.run()
        p.definitions = without_assets.definitions
        outcome = p.settle(run_id)
        assert (outcome.state, outcome.codes) == (RunState.BLOCKED, ("no_check",))


def test_a_table_of_no_asset_is_not_published_without_the_checks_of_the_assets_that_may_have_written_it(
    lake: Lakehouse, namespace: str
) -> None:
    @dg.asset(key=[namespace, "t"])
    def t(lakehouse: LakehouseResource) -> None:
        catalog = lakehouse.catalog()
        catalog.create_namespace_if_not_exists((namespace,))
        catalog.create_table((namespace, "side"), pa.schema([("n", pa.int64())]))

    @dg.asset_check(asset=t)
    def good() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    with project(lake, t, good) as p:
        outcome = p.settle(without_checks(p))
        assert outcome.state is RunState.BLOCKED
        assert "check_left_out" in outcome.codes
