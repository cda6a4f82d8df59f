"""A code location's resources, made to stand on another lake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dagster import ConfigurableIOManagerFactory, ConfigurableResource

from branchlake_dagster.io_manager.io_manager import NessieBranchIOManager
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.spark_resource import BranchSparkResource

_CONFIGURABLE = (ConfigurableResource, ConfigurableIOManagerFactory)


def standing_on(lakehouse: LakehouseResource, resources: Mapping[str, Any]) -> dict[str, Any]:
    """`resources` with `lakehouse` in place of every lake, also inside others; those of ours that lack.

    A resource that others share stays shared.
    """
    made: dict[int, Any] = {}
    found = {key: _rebound(one, lakehouse, made) for key, one in resources.items()}
    spark = BranchSparkResource(lakehouse=lakehouse)
    defaults = {
        "lakehouse": lakehouse,
        "spark": spark,
        "io_manager": NessieBranchIOManager(lakehouse=lakehouse, spark=spark),
    }
    return defaults | found


def _rebound(resource: Any, lakehouse: LakehouseResource, made: dict[int, Any]) -> Any:
    if isinstance(resource, LakehouseResource):
        return lakehouse
    if not isinstance(resource, _CONFIGURABLE):
        return resource
    if id(resource) not in made:
        fields = {name: getattr(resource, name) for name in type(resource).model_fields}
        new = {
            name: _rebound(value, lakehouse, made) if isinstance(value, _CONFIGURABLE) else value
            for name, value in fields.items()
        }
        changed = any(new[name] is not fields[name] for name in fields)
        made[id(resource)] = type(resource)(**new) if changed else resource
    return made[id(resource)]
