"""Tests Spark sessions that the code of a step gets from resources of its own, as `load_asset_value` builds them."""

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster import BranchSparkResource, LakehouseResource, table_metadata
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.runs import spark_resource
from branchlake_dagster_tests import harness
from branchlake_dagster_tests.suite import memory

lakehouse = memory.lakehouse


class Session:
    """Stands for a Spark Connect session."""

    def __init__(self, *, fails_to_stop: bool = False) -> None:
        self.is_open = True
        self._fails_to_stop = fails_to_stop

    def stop(self) -> None:
        self.is_open = False
        if self._fails_to_stop:
            raise OSError("The server does not answer.")


def test_a_session_stays_open_until_the_step_ends(
    lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_resource, "is_connect", lambda _: True)
    monkeypatch.setattr(BranchSparkResource, "_open_session", lambda *_: Session())
    opened = []

    @dg.asset(metadata=table_metadata(require_checks=False))
    def prices(context: dg.AssetExecutionContext) -> pl.DataFrame:
        resource = BranchSparkResource(lakehouse=LakehouseResource.from_settings(lakehouse.settings))
        for _ in range(2):
            with dg.build_resources({"spark": resource}, instance=context.instance) as resources:
                opened.append(resources.spark.own_session())
        assert [session.is_open for session in opened] == [True, True]
        return pl.DataFrame({"eur": [1]})

    with harness.project(lakehouse, prices) as p:
        p.settle(p.run())
    assert opened[0] is opened[1]
    assert not opened[0].is_open


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_all_sessions_are_closed_although_one_fails_to_close(
    lakehouse: Lakehouse, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    sessions = [Session(fails_to_stop=True), Session()]
    unopened = iter(sessions)
    monkeypatch.setattr(spark_resource, "is_connect", lambda _: True)
    monkeypatch.setattr(BranchSparkResource, "_open_session", lambda *_: next(unopened))

    @dg.asset(metadata=table_metadata(require_checks=False))
    def prices(context: dg.AssetExecutionContext) -> pl.DataFrame:
        for value in ("a", "b"):
            resource = BranchSparkResource(
                lakehouse=LakehouseResource.from_settings(lakehouse.settings),
                spark_config={"spark.app.name": value},
            )
            with dg.build_resources({"spark": resource}, instance=context.instance) as resources:
                resources.spark.own_session()
        assert [session.is_open for session in sessions] == [True, True]
        if is_interrupted:
            raise KeyboardInterrupt
        return pl.DataFrame({"eur": [1]})

    with harness.project(lakehouse, prices) as p:
        p.run(ok=not is_interrupted)
    assert [session.is_open for session in sessions] == [False, False]
