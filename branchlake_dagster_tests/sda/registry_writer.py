"""One writer of the registry in a process of its own: `python -m … SNAPSHOT`, from launch to verdict."""

import os
import sys

import dagster as dg

from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.publication.reconciler import Reconciler
from branchlake_dagster.sda.assets.catalogue import gp_ingest
from branchlake_dagster.sda.assets.registry import registry
from branchlake_dagster.sda.sources import GpSource
from branchlake_dagster.settings import Settings

assets = [
    one.map_asset_specs(lambda spec: spec.merge_attributes(metadata={"branchlake/require_checks": False}))
    for one in (gp_ingest, registry)
]
definitions = dg.Definitions.merge(
    branchlake_definitions(),
    dg.Definitions(
        assets=assets,
        resources={"gp": GpSource(catalogue_dir=os.environ["TEST_FOLDER"])},
        executor=dg.in_process_executor,
    ),
)

if __name__ == "__main__":
    with dg.DagsterInstance.get() as instance:
        job = definitions.resolve_implicit_global_asset_job_def()
        done = job.execute_in_process(
            instance=instance,
            asset_selection=[key for one in assets for key in one.keys],
            partition_key=sys.argv[1],
            raise_on_error=False,
        )
        graph = definitions.get_repository_def().asset_graph
        outcome = Reconciler.from_lake(Lakehouse(Settings()), instance, graph).reconcile_run(done.run_id)
    sys.exit(0 if outcome is not None and outcome.publication else 1)
