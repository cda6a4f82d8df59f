"""The code location as a whole: every spec in a snapshot, so that no change of one goes unseen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from syrupy.assertion import SnapshotAssertion

from branchlake_dagster.sda.graph.code_location import build_definitions
from branchlake_dagster.settings import Settings


@pytest.fixture(scope="module")
def definitions(tmp_path_factory: pytest.TempPathFactory) -> dg.Definitions:
    return build_definitions(Settings(state_dir=tmp_path_factory.mktemp("specs")))


def plain(value: Any) -> Any:
    """A metadata value without addresses of this machine or this run."""
    if isinstance(value, dg.TableSchema):
        return {one.name: f"{one.type}: {one.description}" for one in value.columns}
    value = getattr(value, "value", value)
    return value if isinstance(value, bool | int | float | str | list | dict) else type(value).__name__


def partitions(definition: dg.PartitionsDefinition[str] | None) -> Any:
    if definition is None:
        return None
    if isinstance(definition, dg.MultiPartitionsDefinition):
        return {one.name: partitions(one.partitions_def) for one in definition.partitions_defs}
    if isinstance(definition, dg.TimeWindowPartitionsDefinition):
        end = definition.end.isoformat() if definition.end else None
        return f"{definition.cron_schedule} {definition.timezone} {definition.start.isoformat()} to {end}"
    if isinstance(definition, dg.StaticPartitionsDefinition):
        return list(definition.get_partition_keys())
    assert isinstance(definition, dg.DynamicPartitionsDefinition)
    return f"dynamic {definition.name}"


def test_assets(definitions: dg.Definitions, snapshot: SnapshotAssertion) -> None:
    specs = {
        spec.key.to_user_string(): {
            "group": spec.group_name,
            "deps": sorted(dep.asset_key.to_user_string() for dep in spec.deps),
            "partitions": partitions(spec.partitions_def),
            "metadata": {key: plain(value) for key, value in sorted(spec.metadata.items())},
            "code_version": spec.code_version,
            "owners": list(spec.owners),
            "kinds": sorted(spec.kinds),
            "freshness": repr(spec.freshness_policy),
            "tags": {key: value for key, value in spec.tags.items() if not key.startswith("dagster/kind/")},
            "automation": spec.automation_condition is not None,
            "skippable": spec.skippable,
            "described": bool(spec.description),
        }
        for spec in definitions.resolve_all_asset_specs()
    }
    assert specs == snapshot


def test_asset_checks(definitions: dg.Definitions, snapshot: SnapshotAssertion) -> None:
    graph = definitions.get_repository_def().asset_graph
    specs: dict[str, dict[str, str]] = {}
    for key in sorted(graph.asset_check_keys):
        spec = graph.get_check_spec(key)
        told = [f"{name}={plain(value)}" for name, value in sorted((spec.metadata or {}).items())]
        told += ["blocking" if spec.blocking else "not blocking", "described" if spec.description else "bare"]
        told += sorted(f"after {dep.asset_key.to_user_string()}" for dep in spec.additional_deps)
        told.append(f"partitions {partitions(spec.partitions_def)}")
        specs.setdefault(key.asset_key.to_user_string(), {})[key.name] = ", ".join(told)
    assert specs == snapshot


def test_every_asset_has_a_check(definitions: dg.Definitions) -> None:
    graph = definitions.get_repository_def().asset_graph
    checked = {key.asset_key for key in graph.asset_check_keys}
    assert set(graph.materializable_asset_keys) <= checked


def test_jobs(definitions: dg.Definitions, snapshot: SnapshotAssertion) -> None:
    repository = definitions.get_repository_def()
    jobs = {
        job.name: {
            "assets": sorted(key.to_user_string() for key in job.asset_layer.selected_asset_keys),
            "checks": len(job.asset_layer.asset_graph.asset_check_keys),
            "executor": job.executor_def.name,
            "tags": dict(job.tags),
            "described": bool(job.description),
        }
        for job in repository.get_all_jobs()
    }
    assert jobs == snapshot


def test_sensors(definitions: dg.Definitions, snapshot: SnapshotAssertion) -> None:
    sensors = {
        sensor.name: {
            "interval_s": sensor.minimum_interval_seconds,
            "default_status": sensor.default_status.value,
            "type": sensor.sensor_type.value,
            "resources": sorted(sensor.required_resource_keys),
        }
        for sensor in definitions.get_repository_def().sensor_defs
    }
    assert sensors == snapshot


def test_schedules(definitions: dg.Definitions, snapshot: SnapshotAssertion) -> None:
    schedules = {
        schedule.name: {
            "cron": schedule.cron_schedule,
            "time_zone": schedule.execution_timezone,
            "default_status": schedule.default_status.value,
            "job": schedule.job_name,
        }
        for schedule in definitions.get_repository_def().schedule_defs
    }
    assert schedules == snapshot


def test_resources(definitions: dg.Definitions, snapshot: SnapshotAssertion) -> None:
    resources = definitions.get_repository_def().get_top_level_resources()
    assert sorted(resources) == snapshot


# -- docs/settings.md ----------------------------------------------------------------------------------

SETTINGS = Path(__file__).parents[1] / "docs" / "settings.md"


def documented() -> dict[str, str]:
    """Variable -> default, from the rows of the page's table."""
    rows = re.findall(
        r"^\|\s*`(BRANCHLAKE_[A-Z0-9_]+)`\s*\|([^|]*)\|", SETTINGS.read_text(), flags=re.MULTILINE
    )
    return {name: default.strip().strip("`") for name, default in rows}


def test_every_setting_has_its_row_with_the_right_default() -> None:
    rows = documented()
    wrong = {}
    for name, field in Settings.model_fields.items():
        variable = f"BRANCHLAKE_{name.upper()}"
        told = rows.get(variable)
        if told is None:
            wrong[variable] = "no row"
        elif field.default is None:
            # What stands in for an unset one is told in words.
            continue
        elif told.lower() not in (str(field.default).lower(), str(field.default).removesuffix(".0")):
            wrong[variable] = f"the page says {told!r}, the code {field.default!r}"
    assert not wrong


def test_every_row_is_a_setting() -> None:
    assert set(documented()) == {f"BRANCHLAKE_{name.upper()}" for name in Settings.model_fields}
