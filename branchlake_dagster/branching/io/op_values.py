"""Values that go from op to op: inside a graph-backed asset, and in op jobs beside the assets.

They are no tables: nobody checks or publishes them, so they go where Dagster's own default puts them, into
pickle files in the instance's storage folder, and a run that writes no asset makes no branch.
"""

from __future__ import annotations

from typing import Any

from dagster import FilesystemIOManager, InputContext, OutputContext, build_init_resource_context
from pyspark.sql import DataFrame

from branchlake_dagster.branching.errors import UnsupportedType


def store(context: OutputContext, value: Any) -> None:
    """Keep what an op returned for the ops after it. Raises UnsupportedType for a Spark frame."""
    if isinstance(value, DataFrame):
        raise UnsupportedType(
            f"Op output {context.step_key}.{context.name} is a Spark frame: it is a query of its process's"
            " session and cannot be handed to another op.",
            hint="Return a pandas, Polars or Arrow frame, the name of a table, or make one op of the two.",
        )
    _files(context).handle_output(context, value)


def load(context: InputContext) -> Any:
    """What an op before this one returned."""
    return _files(context).load_input(context)


def _files(context: InputContext | OutputContext) -> Any:
    instance = context.step_context.instance
    manager = FilesystemIOManager(base_dir=instance.storage_directory())
    return manager.create_io_manager(build_init_resource_context(instance=instance))
