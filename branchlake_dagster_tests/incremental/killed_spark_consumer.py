"""Run by test_spark_changes.py: a run of a consumer that dies between its change tables and its write."""

import os
import signal
from typing import Any

import dagster as dg

from branchlake_dagster.incremental import spark_inputs
from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster.lakehouse.lakehouse import Lakehouse
from branchlake_dagster.tables import spark_frames
from branchlake_dagster_tests.incremental.test_spark_changes import Shop


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    shop = Shop(Lakehouse(), os.environ["BRANCHLAKE_TEST_NAMESPACE"], make=False)
    spark_inputs.MAX_SENT_ROWS = 0
    spark_frames.write_spark_frame = die
    defs = dg.Definitions.merge(
        branchlake_definitions(), dg.Definitions(assets=shop.assets, executor=dg.in_process_executor)
    )
    with dg.DagsterInstance.get() as instance:
        job = defs.resolve_implicit_global_asset_job_def()
        job.execute_in_process(instance=instance, asset_selection=shop.consumers[:1])


if __name__ == "__main__":
    main()
