"""Definitions that merge into anybody's, and mistakes that are named when they load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
from pydantic import ValidationError

from branchlake_dagster import (
    BranchSparkResource,
    LakehouseResource,
    NessieBranchIOManager,
    Settings,
    branchlake_definitions,
    consumes,
    sql_check,
    table_metadata,
)
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.lake_definitions import DefinitionsWarning
from branchlake_dagster.stored_names import AssetMetadata
from branchlake_dagster_tests.suite.raised import raising

DAYS = dg.DailyPartitionsDefinition("2026-08-01")
SHELVES = dg.MultiPartitionsDefinition({"day": DAYS, "kind": dg.StaticPartitionsDefinition(["x"])})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path, nessie_uri="https://nessie.example.org/api/v2", nessie_token="s3cret")


def resource(defs: dg.Definitions, key: str) -> Any:
    return (defs.resources or {})[key]


def shown(defs: dg.Definitions) -> dict[str, Any]:
    """What Dagster's UI shows of the top-level resources."""
    found = defs.get_repository_def().get_top_level_resources()
    return {key: str(getattr(one, "config_schema", one).__dict__) for key, one in found.items()}


def asset(name: str = "t", **options: Any) -> dg.AssetsDefinition:
    @dg.asset(**({"key": [name]} | options))
    def made() -> pl.DataFrame:
        return pl.DataFrame({"n": [1]})

    return made


def checked(one: dg.AssetsDefinition) -> dg.AssetChecksDefinition:
    return sql_check(one, "positive", "SELECT * FROM {this} WHERE n < 0")


def test_settings_reach_every_resource(settings: Settings) -> None:
    defs = branchlake_definitions(settings)
    lakes = [
        resource(defs, "lakehouse"),
        resource(defs, "spark").lakehouse,
        resource(defs, "io_manager").lakehouse,
        resource(defs, "io_manager").spark.lakehouse,
    ]
    for lake in lakes:
        found = lake.effective()
        assert (found.state_dir, found.nessie_uri) == (settings.state_dir, settings.nessie_uri)
        assert found.nessie_token is not None
        assert found.nessie_token.get_secret_value() == "s3cret"


def test_the_effective_nessie_and_warehouse_are_shown_and_no_secret(
    settings: Settings, tmp_path: Path
) -> None:
    lake = resource(branchlake_definitions(settings), "lakehouse")
    assert (lake.nessie_uri, lake.warehouse) == (settings.nessie_uri, f"file://{tmp_path}/warehouse")
    embedded = resource(branchlake_definitions(Settings(state_dir=tmp_path)), "lakehouse")
    assert (embedded.nessie_uri, embedded.effective().nessie_uri) == ("embedded", None)
    assert "s3cret" not in repr(lake) + str(shown(branchlake_definitions(settings)))


def test_the_environment_does_not_override_what_is_given(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    defs = branchlake_definitions(Settings(state_dir=settings.state_dir))
    monkeypatch.setenv("BRANCHLAKE_NESSIE_URI", "https://elsewhere.example.org/api/v2")
    assert resource(defs, "lakehouse").effective().nessie_uri is None


def test_every_setting_is_a_field_of_the_resource_with_its_description() -> None:
    fields = {
        name: one for name, one in LakehouseResource.model_fields.items() if name in Settings.model_fields
    }
    assert fields.keys() == Settings.model_fields.keys()
    for name, one in fields.items():
        assert one.description == Settings.model_fields[name].description


def test_a_wrong_field_is_an_error_at_once() -> None:
    with raising(ValidationError, "reap_interval_min", 45):
        LakehouseResource(reap_interval_min=45)
    with raising(ValidationError, "session_kind"):
        LakehouseResource(session_kind="conect")


def test_it_merges_with_resources_of_the_same_kinds(settings: Settings) -> None:
    theirs = dg.Definitions(
        assets=[asset()],
        resources={"io_manager": dg.FilesystemIOManager(), "spark": dg.ResourceDefinition.none_resource()},
    )
    ours = branchlake_definitions(settings, name="lake")
    merged = dg.Definitions.merge(ours, theirs)
    dg.Definitions.validate_loadable(merged)
    assert set(merged.resources or {}) == {
        "lake_lakehouse",
        "lake_spark",
        "lake_io_manager",
        "io_manager",
        "spark",
    }


def test_several_lakes_in_one_location(settings: Settings, tmp_path: Path) -> None:
    hot = branchlake_definitions(settings, name="hot")
    cold = branchlake_definitions(
        Settings(state_dir=tmp_path / "cold"), name="cold", io_manager_key="archive"
    )
    merged = dg.Definitions.merge(hot, cold)
    repository = merged.get_repository_def()
    assert {one.name for one in repository.sensor_defs} == {
        "hot_publication_sensor",
        "hot_dead_writer_sensor",
        "cold_publication_sensor",
        "cold_dead_writer_sensor",
    }
    assert {one.name for one in repository.schedule_defs} == {
        "hot_reap_branches_schedule",
        "cold_reap_branches_schedule",
    }
    assert "archive" in (merged.resources or {})
    for sensor in repository.sensor_defs:
        assert sensor.required_resource_keys == {f"{sensor.name.partition('_')[0]}_lakehouse"}


def test_a_lakehouse_of_variables_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_PLACE", str(tmp_path))
    lake = LakehouseResource(state_dir=str(tmp_path), nessie_token=dg.EnvVar("MY_TOKEN"))
    monkeypatch.setenv("MY_TOKEN", "abc")
    defs = branchlake_definitions(lakehouse=lake)
    assert resource(defs, "lakehouse") is lake
    assert isinstance(resource(defs, "io_manager"), NessieBranchIOManager)
    assert isinstance(resource(defs, "spark"), BranchSparkResource)


MISTAKES = {
    "unknown write mode": (
        asset(metadata={"branchlake/write_mode": "replase"}),
        ["replase", "replace_partitions"],
    ),
    "partitions without a column": (
        asset(partitions_def=DAYS),
        ["table_metadata(partition_by=…)"],
    ),
    "upsert without keys": (
        asset(metadata={"branchlake/write_mode": "upsert"}),
        ["table_metadata(keys=[…])"],
    ),
    "one column for several dimensions": (
        asset(partitions_def=SHELVES, metadata=table_metadata(partition_by="day")),
        ["day, kind", "partition_by={dimension: column}"],
    ),
    "a dimension without a column": (
        asset(partitions_def=SHELVES, metadata=table_metadata(partition_by={"day": "ts"})),
        ["kind", "partition_by"],
    ),
    "a dimension that is not there": (
        asset(
            partitions_def=SHELVES,
            metadata=table_metadata(partition_by={"day": "ts", "kind": "kind", "colour": "c"}),
        ),
        ["colour", "day, kind"],
    ),
    "a column of two dimensions": (
        asset(partitions_def=SHELVES, metadata=table_metadata(partition_by={"day": "kind", "kind": "kind"})),
        ["day, kind", "partition_by"],
    ),
    "a partition column without partitions": (
        asset(metadata=table_metadata(partition_by="day")),
        ["partitions_def", "layout"],
    ),
    "dimensions where there is one": (
        asset(partitions_def=DAYS, metadata=table_metadata(partition_by={"day": "ts"})),
        ["- t:", "column", "dimension"],
    ),
    "a metadata key that nobody reads": (
        asset(metadata={"branchlake/write_mod": "append"}),
        ["branchlake/write_mod.", "branchlake/write_mode?"],
    ),
    "a name that is no table": (asset(key=["a", ".."]), ["- a/..:"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_when_definitions_load(settings: Settings, mistake: str) -> None:
    wrong, expected = MISTAKES[mistake]
    theirs = dg.Definitions(assets=[wrong, asset("fine")], asset_checks=[checked(asset("fine"))])
    (key,) = wrong.keys
    subject = key.to_user_string()
    with raising(ConfigurationError, *expected, reason="definitions", subject=subject):
        branchlake_definitions(settings, theirs)


def test_an_asset_without_any_check_is_named(settings: Settings) -> None:
    bare, fine = asset("bare"), asset("fine")
    excused = asset("excused", metadata=table_metadata(require_checks=False))
    elsewhere = asset("elsewhere", io_manager_key="files")
    theirs = dg.Definitions(
        assets=[bare, fine, excused, elsewhere],
        asset_checks=[checked(fine)],
        resources={"files": dg.FilesystemIOManager()},
    )
    with raising(
        ConfigurationError, "table_metadata(require_checks=False)", reason="definitions", subject="bare"
    ):
        branchlake_definitions(settings, theirs)
    lenient = settings.model_copy(update={"require_checks": False})
    assert branchlake_definitions(lenient, theirs).get_repository_def()


def daily_with_check(**options: Any) -> dg.Definitions:
    prices = asset("prices", partitions_def=DAYS, metadata=table_metadata(partition_by="day"))

    @dg.asset_check(asset=prices, **options)
    def positive() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    return dg.Definitions(assets=[prices], asset_checks=[positive])


def test_a_check_that_reads_all_partitions_unasked_is_reported(settings: Settings) -> None:
    with pytest.warns(DefinitionsWarning) as warned:
        branchlake_definitions(settings, daily_with_check())
    told = str(warned.pop(DefinitionsWarning).message)
    assert [name for name in ("prices", "positive", "partitions_def") if name not in told] == []
    strict = settings.model_copy(update={"unpartitioned_checks": "error"})
    with raising(ConfigurationError, "positive", "partitions_def", reason="definitions", subject="prices"):
        branchlake_definitions(strict, daily_with_check())
    allowed = settings.model_copy(update={"unpartitioned_checks": "allow"})
    assert branchlake_definitions(allowed, daily_with_check()).get_repository_def()


def test_an_argument_of_table_metadata_as_a_bare_key_is_reported(settings: Settings) -> None:
    wrong = asset(metadata={"write_mode": "append"})
    theirs = dg.Definitions(assets=[wrong], asset_checks=[checked(wrong)])
    with pytest.warns(DefinitionsWarning) as warned:
        branchlake_definitions(settings, theirs)
    assert "table_metadata(write_mode=…)" in str(warned.pop(DefinitionsWarning).message)


@pytest.mark.parametrize(
    "options", [{"partitions_def": DAYS}, {"metadata": {AssetMetadata.CHECK_SCOPE: "table"}}]
)
def test_a_check_with_partitions_or_a_scope_is_as_it_should_be(
    settings: Settings, options: dict[str, Any]
) -> None:
    assert branchlake_definitions(settings, daily_with_check(**options)).get_repository_def()


def test_all_mistakes_are_reported_at_once(settings: Settings) -> None:
    theirs = dg.Definitions(assets=[asset("one"), asset("two"), asset("three", partitions_def=DAYS)])
    with raising(ConfigurationError, 3, reason="definitions", subject="one, three, two") as caught:
        branchlake_definitions(settings, theirs)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "- one",
        "- three",
        "- two",
    ]


def test_two_assets_of_one_table(settings: Settings) -> None:
    settings = settings.model_copy(update={"require_checks": False, "default_namespace": "shop"})
    theirs = dg.Definitions(assets=[asset("prices"), asset(key=["shop", "prices"])])
    with raising(ConfigurationError, "shop.prices", reason="definitions", subject="shop/prices"):
        branchlake_definitions(settings, theirs)


def test_a_namespace_that_is_an_asset_which_may_have_no_table(settings: Settings) -> None:
    @dg.asset(key=["shop", "prices"])
    def without_table() -> dg.MaterializeResult[None]:
        return dg.MaterializeResult()

    @dg.asset(key=["shop", "costs"])
    def unknown():  # type: ignore[no-untyped-def]
        return None

    nested = [asset(key=["shop", name, "daily"]) for name in ("prices", "costs")]
    settings = settings.model_copy(update={"require_checks": False})
    with pytest.warns(DefinitionsWarning):
        branchlake_definitions(settings, dg.Definitions(assets=[without_table, unknown, *nested]))


@pytest.mark.parametrize("key", [["shop", "prices", "daily"], ["shop", "prices", "daily", "eur"]], ids=str)
def test_a_table_in_a_namespace_that_is_another_asset(settings: Settings, key: list[str]) -> None:
    settings = settings.model_copy(update={"require_checks": False, "default_namespace": "shop"})
    theirs = dg.Definitions(assets=[asset("prices"), asset(key=key)])
    with raising(ConfigurationError, "shop.prices", reason="definitions", subject="/".join(key)):
        branchlake_definitions(settings, theirs)


@pytest.mark.parametrize(
    ("mapping", "fits"),
    [
        (None, True),
        (dg.IdentityPartitionMapping(), True),
        (dg.TimeWindowPartitionMapping(), True),
        (dg.TimeWindowPartitionMapping(start_offset=-1), True),
        (dg.AllPartitionMapping(), False),
        (dg.LastPartitionMapping(), False),
    ],
)
def test_changes_are_consumed_by_the_partition_that_rows_belong_to(
    settings: Settings, mapping: dg.PartitionMapping | None, fits: bool
) -> None:
    """Under other mappings a changed row changes results of other partitions, which no run would compute."""
    settings = settings.model_copy(update={"require_checks": False})

    @dg.asset(partitions_def=DAYS, metadata=table_metadata(partition_by="day"))
    def events() -> pl.DataFrame:
        return pl.DataFrame()

    @dg.asset(
        partitions_def=DAYS,
        ins={"events": dg.AssetIn(partition_mapping=mapping)},
        metadata=table_metadata(partition_by="day") | consumes({"events": "range"}),
    )
    def rolling(events: pl.DataFrame) -> pl.DataFrame:
        return events

    theirs = dg.Definitions(assets=[events, rolling])
    if fits:
        branchlake_definitions(settings, theirs)
        return
    with pytest.raises(ConfigurationError) as caught:
        branchlake_definitions(settings, theirs)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:]] == ["- rolling"]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("settings", {"state_dir": "x"}),
        ("definitions", []),
        ("definitions", dg.definitions(lambda: dg.Definitions())),
        ("lakehouse", {}),
        ("lakehouse", Settings()),
    ],
)
def test_arguments_of_other_types_are_refused(argument: str, value: Any) -> None:
    with raising(ConfigurationError, reason="argument_type", subject=argument):
        branchlake_definitions(**{argument: value})


def test_definitions_in_the_place_of_the_settings_are_refused() -> None:
    misplaced: Any = dg.Definitions(assets=[asset()])
    with raising(ConfigurationError, reason="definitions_as_settings"):
        branchlake_definitions(misplaced)
