"""A throw-away lake for tests: run assets, publish runs, read tables."""

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
from branchlake_dagster.publication.publish import RunOutcome, publish
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
    """`resources` with `lakehouse` in place of every lake, also inside others; those of ours that lack.

    A resource that others share stays shared.
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
"""A run, by its id or by what Dagster gave back."""


class ThrowawayLake:
    """A lake that is there for one test. Made by `throwaway_lake()` and by the fixture `lake`.

    Attributes:
        lakehouse (Lakehouse): Its connections: `lake.lakehouse.nessie`, `lake.lakehouse.catalog("main")`.
        instance (DagsterInstance): The Dagster instance that has its runs.
    """

    def __init__(self, lakehouse: Lakehouse, instance: dg.DagsterInstance) -> None:
        self.lakehouse = lakehouse
        self.instance = instance
        self._definitions: dict[str, dg.Definitions] = {}

    @property
    def resources(self) -> dict[str, Any]:
        """`lakehouse`, `spark` and `io_manager` of this lake, for `dg.materialize(…, resources=…)`."""
        return bind_to_lake(LakehouseResource(), {})

    def definitions(self, *parts: Any, resources: Mapping[str, Any] | None = None) -> dg.Definitions:
        """Definitions whose resources stand on this lake, whichever lake they stood on.

        Args:
            *parts: Assets, asset checks, lists of them, or `Definitions`.
            resources (Optional[Mapping[str, Any]]): More resources. A `LakehouseResource` among them or
                inside them is replaced by this lake's.

        Returns:
            Definitions: Their assets, checks and jobs, and the resources, to which `lakehouse`, `spark` and
            `io_manager` are added where they lack.
        """
        flat_parts = list(_flatten_parts(parts))
        checks = [part for part in flat_parts if isinstance(part, dg.AssetChecksDefinition)]
        definitions_parts = [part for part in flat_parts if isinstance(part, dg.Definitions)]
        assets = [
            part for part in flat_parts if not isinstance(part, dg.AssetChecksDefinition | dg.Definitions)
        ]
        merged = dg.Definitions.merge(*definitions_parts, dg.Definitions(assets=assets, asset_checks=checks))
        all_resources = {**(merged.resources or {}), **(resources or {})}
        # Not `with_resources`, which refuses another resource under a key that is there.
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
        """Runs assets and their checks in this process, on a branch of the lake. Publishes nothing.

        Args:
            *parts: Assets, asset checks, lists of them, or `Definitions`.
            select (Optional[CoercibleToAssetSelection]): Which of the assets; their checks run with them.
                (default: all)
            partition (Optional[str]): The partition to run, for partitioned assets.
            resources (Optional[Mapping[str, Any]]): More resources, by key.
            run_config (Optional[Any]): As `execute_in_process` takes it.
            tags (Optional[Mapping[str, str]]): Tags of the run.
            raise_on_error (bool): Raise what a step raised. With False the result tells of a failed run,
                which can be published: it is discarded.

        Returns:
            ExecuteInProcessResult: Dagster's own.

        Examples:
            .. code-block:: python

                result = lake.run(defs, select="shop/prices", partition="2026-01-01")
                assert result.output_for_node("shop__prices").height == 3
        """
        definitions = self.definitions(*parts, resources=resources)
        job = definitions.resolve_implicit_global_asset_job_def()
        if not job.asset_layer.executable_asset_keys:
            raise ConfigurationError("There is no asset to run.", hint="lake.run(asset, check, …)")
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
        """Judges a run by the real gate and publishes it if it passes; see `branchlake_dagster.publish`.

        Args:
            run (str | ExecuteInProcessResult | DagsterRun): A run of this lake's instance.
            definitions (Optional[Definitions]): The assets and checks it is judged by. (default: those that
                it was run with)

        Returns:
            RunOutcome: Its status, the reasons when it is not published, the commit when it is.

        Raises:
            ConfigurationError: It was not run by `lake.run`, and no definitions are given.
        """
        run_id = run if isinstance(run, str) else run.run_id
        run_definitions = definitions or self._definitions.get(run_id)
        if run_definitions is None:
            raise ConfigurationError(
                f"Run {run_id} was not made by lake.run, so its checks are not known.",
                hint="Give them: lake.publish(run, definitions).",
                reason="checks_unknown",
            )
        return publish(run_id, run_definitions, instance=self.instance, lakehouse=self.lakehouse)

    def table(self, name: str | dg.AssetKey, *, of: RunLike | None = None) -> pa.Table:
        """The rows of a table.

        Args:
            name (str | AssetKey): `namespace.table`, or an asset's key. A name without a dot is in the
                default namespace, as the asset with that key is.
            of (Optional[str | ExecuteInProcessResult | DagsterRun]): A run, to see what it has written and
                `main` does not have: before its publication, or when it was blocked. (default: `main`)

        Returns:
            pyarrow.Table: All columns, in the order of the table.

        Raises:
            TableMissing: There is no such table; the text names those that there are.

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
                "There is no such table.",
                table=format_table_name(identifier),
                branch=ref,
                hint=f"There are: {', '.join(self.tables(of=of)) or 'none'}.",
                reason="no_table",
            ) from error
        return table.scan().to_arrow()

    def polars(self, name: str | dg.AssetKey, *, of: RunLike | None = None) -> pl.DataFrame:
        """The same as a Polars frame.

        Args:
            name (str | AssetKey): As for `table`.
            of (Optional[str | ExecuteInProcessResult | DagsterRun]): As for `table`.

        Returns:
            polars.DataFrame: All columns.
        """
        return pl.DataFrame(self.table(name, of=of))

    def tables(self, *, of: RunLike | None = None) -> list[str]:
        """The dotted names of the tables on `main`, or of those a run sees.

        Args:
            of (Optional[str | ExecuteInProcessResult | DagsterRun]): As for `table`.

        Returns:
            list[str]: Sorted.
        """
        ref = MAIN if of is None else self._find_run_ref(of)
        entries = self.lakehouse.nessie.entries(ref, fetch_content=True)
        return sorted(entry.key.name for entry in entries if isinstance(entry.content, IcebergTable))

    def references(self) -> list[str]:
        """The names of all branches and tags but `main`, sorted: what runs have left."""
        return sorted(ref.name for ref in self.lakehouse.nessie.references() if ref.name != MAIN)

    def _find_run_ref(self, run: RunLike) -> str:
        run_id = run if isinstance(run, str) else run.run_id
        existing_refs = self.references()
        for name in (run_branch_name(run_id), f"{ReferencePrefix.DISCARDED}{run_id}"):
            if name in existing_refs:
                return name
        raise TableMissing(
            "The run has no branch: it was published, or it touched no table.",
            run_id=run_id,
            hint="What is published is on main: leave `of` out.",
            reason="no_branch",
        )


def _flatten_parts(parts: Sequence[Any]) -> Iterator[Any]:
    for part in parts:
        if type(part) in (list, tuple):  # Dagster's own classes may be tuples, too
            yield from _flatten_parts(part)
        else:
            yield part
