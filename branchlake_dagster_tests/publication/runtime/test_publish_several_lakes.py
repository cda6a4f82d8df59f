"""`publish` in a code location with several lakes: each run is judged by the lake that it wrote to."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import polars as pl
import pytest

from branchlake_dagster import LakehouseResource, Settings, branchlake_definitions, publish
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster_tests.suite import memory
from branchlake_dagster_tests.suite.instances import new_instance
from branchlake_dagster_tests.suite.raised import raising

lakehouse = memory.lakehouse


@dataclass
class TwoLakes:
    """A lake that requires checks, and one that does not, with a finished run of the second."""

    strict: Settings
    free: Settings
    instance: dg.DagsterInstance
    run_id: str = ""

    @property
    def asset(self) -> dg.AssetsDefinition:
        @dg.asset(key=["cold", "t"], io_manager_key="free_io_manager")
        def t() -> pl.DataFrame:
            return pl.DataFrame({"n": [1]})

        return t

    def definitions(self, **lakes: Settings) -> dg.Definitions:
        parts = [branchlake_definitions(settings, name=name) for name, settings in lakes.items()]
        assets = dg.Definitions(assets=[self.asset] if "free" in lakes else [])
        return dg.Definitions.merge(*parts, assets, dg.Definitions(executor=dg.in_process_executor))


@pytest.fixture
def two(lakehouse: Lakehouse, tmp_path: Path) -> Iterator[TwoLakes]:
    strict = lakehouse.settings.model_copy(
        update={"warehouse": f"file://{tmp_path}/strict", "require_checks": True}
    )
    free = lakehouse.settings.model_copy(update={"require_checks": False})
    with new_instance() as instance:
        lakes = TwoLakes(strict, free, instance)
        job = lakes.definitions(strict=strict, free=free).resolve_implicit_global_asset_job_def()
        lakes.run_id = job.execute_in_process(instance=instance).run_id
        yield lakes


def test_a_run_is_published_to_its_own_lake(two: TwoLakes) -> None:
    outcome = publish(two.run_id, two.definitions(strict=two.strict, free=two.free), instance=two.instance)
    assert outcome.published, outcome


def test_two_names_of_one_lake_are_one_lake(two: TwoLakes) -> None:
    outcome = publish(two.run_id, two.definitions(again=two.free, free=two.free), instance=two.instance)
    assert outcome.published, outcome


def test_a_run_of_a_lake_that_the_definitions_lack_is_not_judged(two: TwoLakes) -> None:
    with raising(ConfigurationError, reason="lake_differs", run_id=two.run_id):
        publish(two.run_id, two.definitions(strict=two.strict), instance=two.instance)
    for other in (Lakehouse(two.strict, start=False), LakehouseResource.from_settings(two.strict)):
        with raising(ConfigurationError, reason="lake_differs", run_id=two.run_id):
            publish(two.run_id, two.definitions(free=two.free), instance=two.instance, lakehouse=other)
    assert publish(two.run_id, two.definitions(free=two.free), instance=two.instance).published


def test_a_lake_that_has_two_settings_must_be_chosen(two: TwoLakes) -> None:
    strict = two.free.model_copy(update={"require_checks": True})
    definitions = two.definitions(strict=strict, free=two.free)
    with raising(ConfigurationError, reason="lake_ambiguous", run_id=two.run_id):
        publish(two.run_id, definitions, instance=two.instance)
    chosen = Lakehouse(two.free, start=False)
    assert publish(two.run_id, definitions, instance=two.instance, lakehouse=chosen).published
