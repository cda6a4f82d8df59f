"""Assets of fifty partitions for the backfill benchmark, with the IO managers of branchlake and PyIceberg."""

from typing import Any

import dagster as dg
import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.expressions import In
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.settings import Settings
from branchlake_dagster.tables.specification import table_metadata
from branchlake_dagster.waiting import holds_within

PARTITIONS = tuple(f"p{number:02}" for number in range(50))
ROWS = 1_000
NAMESPACE = "parts"
SCHEMA = Schema(NestedField(1, "part", StringType()), NestedField(2, "n", LongType()))
LAYOUT = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "part"))

_PLAIN_KEY = "plain_io_manager"
_partitions = dg.StaticPartitionsDefinition([*PARTITIONS])
_RETRY_S = 60.0


class PlainPartitionIOManager(dg.IOManager):
    """An IO manager without branchlake: PyIceberg replaces rows on `main` and repeats after a conflict."""

    def __init__(self, settings: Settings) -> None:
        self._lake = Lakehouse(settings)

    def handle_output(self, context: dg.OutputContext, obj: pa.Table) -> None:
        """Replace the rows of the run's partitions in the asset's table, which must exist."""
        catalog = self._lake.catalog(MAIN)
        identifier = tuple(context.asset_key.path)
        row_filter = In("part", set(context.asset_partition_keys))

        def try_overwrite() -> bool:
            try:
                catalog.load_table(identifier).overwrite(obj, overwrite_filter=row_filter)
            except CommitFailedException:  # another run committed first
                return False
            return True

        if not holds_within(_RETRY_S, try_overwrite, every_s=0.05):
            raise dg.Failure(
                f"Other runs changed table {'.'.join(identifier)} without a pause for {_RETRY_S:.0f} s."
            )

    def load_input(self, context: dg.InputContext) -> Any:
        """Not supported, because no asset of the benchmark reads another."""
        raise NotImplementedError


def _build_rows(context: dg.AssetExecutionContext) -> pa.Table:
    keys = context.partition_keys
    return pa.table({"part": [key for key in keys for _ in range(ROWS)], "n": [*range(ROWS)] * len(keys)})


def _build_asset(name: str, *, plain: bool, single_run: bool) -> dg.AssetsDefinition:
    @dg.asset(
        key=[NAMESPACE, name],
        group_name="bench",
        partitions_def=_partitions,
        backfill_policy=dg.BackfillPolicy.single_run() if single_run else dg.BackfillPolicy.multi_run(1),
        metadata={} if plain else table_metadata(partition_by="part", require_checks=False),
        io_manager_key=_PLAIN_KEY if plain else None,
    )
    def rows(context: dg.AssetExecutionContext) -> pa.Table:
        return _build_rows(context)

    return rows


ASSETS = {
    (plain, single_run): _build_asset(
        f"{'plain' if plain else 'branched'}_{'one_run' if single_run else 'runs'}",
        plain=plain,
        single_run=single_run,
    )
    for plain in (False, True)
    for single_run in (False, True)
}
"""The assets by two booleans: plain IO manager or branchlake's, and backfill as one run or as fifty."""


def parts_definitions(settings: Settings) -> dg.Definitions:
    """Build the definitions of the assets and of the plain IO manager."""
    return dg.Definitions(
        assets=[*ASSETS.values()], resources={_PLAIN_KEY: PlainPartitionIOManager(settings)}
    )
