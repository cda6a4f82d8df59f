"""The throw-away lake of a test, which runs assets, publishes runs and reads tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg
import polars as pl
import pyarrow as pa
from dagster import ConfigurableIOManagerFactory, ConfigurableResource
from pyiceberg.exceptions import NoSuchTableError

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.io_manager.io_manager import NessieBranchIOManager
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.model import ContentKey, IcebergTable
from branchlake_dagster.publication.run_publication import RunOutcome, publish
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_branch import run_branch_name
from branchlake_dagster.runs.spark_resource import BranchSparkResource
from branchlake_dagster.stored_names import ReferencePrefix
from branchlake_dagster.tables.errors import TableMissing
from branchlake_dagster.tables.specification import format_table_name, table_identifier

if TYPE_CHECKING:
    from branchlake_dagster.internals.dagster import CoercibleToAssetSelection

_CONFIGURABLE = (ConfigurableResource, ConfigurableIOManagerFactory)


def bind_to_lake(lakehouse: LakehouseResource, resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return `resources` with every lake replaced by `lakehouse`, also inside other resources.

    Adds `lakehouse`, `spark` and `io_manager` under their default keys if these keys are missing. A resource
    that several resources share is still shared.
    """
    bound_resources: dict[int, Any] = {}
    bound = {
        key: _rebind_resource(resource, lakehouse, bound_resources) for key, resource in resources.items()
    }
    spark = BranchSparkResource(lakehouse=lakehouse)
    defaults = {
        "lakehouse": lakehouse,
        "spark": spark,
        "io_manager": NessieBranchIOManager(lakehouse=lakehouse, spark=spark),
    }
    return defaults | bound


def _rebind_resource(resource: Any, lakehouse: LakehouseResource, bound_resources: dict[int, Any]) -> Any:
    if isinstance(resource, LakehouseResource):
        return lakehouse
    if not isinstance(resource, _CONFIGURABLE):
        return resource
    if id(resource) not in bound_resources:
        fields = {name: getattr(resource, name) for name in type(resource).model_fields}
        new_fields = {
            name: _rebind_resource(value, lakehouse, bound_resources)
            if isinstance(value, _CONFIGURABLE)
            else value
            for name, value in fields.items()
        }
        changed = any(new_fields[name] is not fields[name] for name in fields)
        bound_resources[id(resource)] = type(resource)(**new_fields) if changed else resource
    return bound_resources[id(resource)]


RunLike = str | dg.ExecuteInProcessResult | dg.DagsterRun
"""A run: its id, or an object of Dagster for it."""


class ThrowawayLake:
    """A lake that exists for one test. `throwaway_lake()` and the fixture `lake` create it.

    Attributes:
        lakehouse (Lakehouse): The connections of the lake, such as `lake.lakehouse.nessie` and
            `lake.lakehouse.catalog("main")`.
        instance (DagsterInstance): The Dagster instance that records the runs of the lake.
    """

    def __init__(self, lakehouse: Lakehouse, instance: dg.DagsterInstance) -> None:
        self.lakehouse = lakehouse
        self.instance = instance
        self._definitions: dict[str, dg.Definitions] = {}

    @property
    def resources(self) -> dict[str, Any]:
        """The resources `lakehouse`, `spark` and `io_manager`, for `dg.materialize(…, resources=…)`."""
        return bind_to_lake(LakehouseResource(), {})

    def definitions(self, *parts: Any, resources: Mapping[str, Any] | None = None) -> dg.Definitions:
        """Merge assets, checks and resources into definitions that use this lake instead of any other.

        Args:
            *parts: Assets, asset checks, lists of them, or `Definitions`.
            resources (Optional[Mapping[str, Any]]): More resources by key. This lake's resource replaces
                every `LakehouseResource`, also inside other resources.

        Returns:
            Definitions: The assets, checks, jobs, loggers and resources of the parts, with `lakehouse`,
            `spark` and `io_manager` added if these keys are missing.
        """
        flat_parts = list(_flatten_parts(parts))
        checks = [part for part in flat_parts if isinstance(part, dg.AssetChecksDefinition)]
        definitions_parts = [part for part in flat_parts if isinstance(part, dg.Definitions)]
        assets = [
            part for part in flat_parts if not isinstance(part, dg.AssetChecksDefinition | dg.Definitions)
        ]
        merged = dg.Definitions.merge(*definitions_parts, dg.Definitions(assets=assets, asset_checks=checks))
        all_resources = {**(merged.resources or {}), **(resources or {})}
        # Dagster's `with_resources` would refuse a resource under a key that an asset already has.
        return dg.Definitions(
            assets=merged.assets,
            asset_checks=merged.asset_checks,
            jobs=merged.jobs,
            loggers=merged.loggers,
            resources=bind_to_lake(LakehouseResource(), all_resources),
        )

    def run(
        self,
        *parts: Any,
        select: CoercibleToAssetSelection | None = None,
        partition: str | None = None,
        resources: Mapping[str, Any] | None = None,
        run_config: Any = None,
        tags: Mapping[str, str] | None = None,
        raise_on_error: bool = True,
    ) -> dg.ExecuteInProcessResult:
        """Run assets and their checks in this process, on a branch of the lake. Publishes nothing.

        Args:
            *parts: Assets, asset checks, lists of them, or `Definitions`.
            select (Optional[CoercibleToAssetSelection]): The assets to run, with their checks.
                (default: all)
            partition (Optional[str]): The partition to run, for partitioned assets.
            resources (Optional[Mapping[str, Any]]): More resources, by key.
            run_config (Optional[Any]): Run configuration as `execute_in_process` accepts it.
            tags (Optional[Mapping[str, str]]): Tags of the run.
            raise_on_error (bool): Raise the error of a failed step. With False a failed run returns its
                result. `publish` then discards the branch of that run.

        Returns:
            ExecuteInProcessResult: Dagster's result of the run.

        Raises:
            ConfigurationError: The parts contain no asset to run.

        Examples:
            .. code-block:: python

                result = lake.run(defs, select="shop/prices", partition="2026-01-01")
                assert result.output_for_node("shop__prices").height == 3
        """
        definitions = self.definitions(*parts, resources=resources)
        job = definitions.resolve_implicit_global_asset_job_def()
        if not job.asset_layer.executable_asset_keys:
            raise ConfigurationError(
                "The definitions contain no asset to run.", hint="Pass assets: lake.run(asset, check, …)."
            )
        selection = None
        if select is not None:
            graph = definitions.resolve_asset_graph()
            selection = sorted(dg.AssetSelection.from_coercible(select).resolve(graph))
        result = job.execute_in_process(
            instance=self.instance,
            asset_selection=selection,
            partition_key=partition,
            run_config=run_config,
            tags=dict(tags or {}),
            raise_on_error=raise_on_error,
        )
        self._definitions[result.run_id] = definitions
        return result

    def publish(self, run: RunLike, definitions: dg.Definitions | None = None) -> RunOutcome:
        """Judge a run by the real gate and publish it if it passes. See `branchlake_dagster.publish`.

        Args:
            run (str | ExecuteInProcessResult | DagsterRun): A run of this lake's instance.
            definitions (Optional[Definitions]): The assets and checks that the gate uses. (default: those of
                `lake.run`)

        Returns:
            RunOutcome: The status of the run, with the commit if it was published and the reasons if it was
                not.

        Raises:
            ConfigurationError: `lake.run` did not start the run, and `definitions` is None.
        """
        run_id = run if isinstance(run, str) else run.run_id
        run_definitions = definitions or self._definitions.get(run_id)
        if run_definitions is None:
            raise ConfigurationError(
                f"Run {run_id} was not started by lake.run, so its assets and checks are not known.",
                hint="Pass its definitions: lake.publish(run, definitions).",
                reason="checks_unknown",
            )
        return publish(run_id, run_definitions, instance=self.instance, lakehouse=self.lakehouse)

    def table(self, name: str | dg.AssetKey, *, of: RunLike | None = None) -> pa.Table:
        """Read the rows of a table.

        Args:
            name (str | AssetKey): `namespace.table`, or an asset's key. A name without a dot is a table in
                the default namespace.
            of (Optional[str | ExecuteInProcessResult | DagsterRun]): Read the table as this run left it,
                on its branch or discarded tag. (default: read it on `main`)

        Returns:
            pyarrow.Table: All columns, in the order of the table.

        Raises:
            TableMissing: The table does not exist, or the run has no branch. The hint lists the existing
                tables.

        Examples:
            .. code-block:: python

                assert lake.table("shop.prices").column("price").to_pylist() == [2.5, 3.0]
        """
        default = self.lakehouse.settings.default_namespace
        key = name if isinstance(name, dg.AssetKey) else dg.AssetKey(list(ContentKey.from_path(name)))
        identifier = table_identifier(key, default)
        ref = MAIN if of is None else self._find_run_ref(of)
        try:
            table = self.lakehouse.catalog(ref).load_table(identifier)
        except NoSuchTableError as error:
            raise TableMissing(
                "The table does not exist.",
                table=format_table_name(identifier),
                branch=ref,
                hint=f"Existing tables: {', '.join(self.tables(of=of)) or 'none'}.",
                reason="no_table",
            ) from error
        return table.scan().to_arrow()

    def polars(self, name: str | dg.AssetKey, *, of: RunLike | None = None) -> pl.DataFrame:
        """Read the rows of a table as a Polars frame.

        Args:
            name (str | AssetKey): As for `table`.
            of (Optional[str | ExecuteInProcessResult | DagsterRun]): As for `table`.

        Returns:
            polars.DataFrame: All columns, in the order of the table.

        Raises:
            TableMissing: As for `table`.
        """
        return pl.DataFrame(self.table(name, of=of))

    def tables(self, *, of: RunLike | None = None) -> list[str]:
        """List the dotted names of the tables on `main`, or on the branch of a run.

        Args:
            of (Optional[str | ExecuteInProcessResult | DagsterRun]): As for `table`.

        Returns:
            list[str]: The sorted names.

        Raises:
            TableMissing: The run has no branch, because it was published or wrote no table.
        """
        ref = MAIN if of is None else self._find_run_ref(of)
        entries = self.lakehouse.nessie.entries(ref, fetch_content=True)
        return sorted(entry.key.name for entry in entries if isinstance(entry.content, IcebergTable))

    def references(self) -> list[str]:
        """Return the sorted names of all branches and tags of the lake, except `main`.

        For example, `run-{id}` is the branch of a run, and `discarded-{id}` the tag of its discarded branch.
        """
        return sorted(ref.name for ref in self.lakehouse.nessie.references() if ref.name != MAIN)

    def _find_run_ref(self, run: RunLike) -> str:
        run_id = run if isinstance(run, str) else run.run_id
        existing_refs = self.references()
        for name in (run_branch_name(run_id), f"{ReferencePrefix.DISCARDED}{run_id}"):
            if name in existing_refs:
                return name
        raise TableMissing(
            "The run has no branch, because it was published or wrote no table.",
            run_id=run_id,
            hint="Read published tables on main: omit the argument `of`.",
            reason="no_branch",
        )


def _flatten_parts(parts: Sequence[Any]) -> Iterator[Any]:
    for part in parts:
        if type(part) in (list, tuple):  # some classes of Dagster are tuples
            yield from _flatten_parts(part)
        else:
            yield part
