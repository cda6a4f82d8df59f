"""The code location of test_backfill_by_daemon.py: the pipeline as it was changed."""

import os

import dagster as dg

from branchlake_dagster import Settings, branchlake_definitions, incremental_sensor
from branchlake_dagster_tests.incremental.backfill.stages import Pipeline

defs = branchlake_definitions(
    Settings(require_checks=False),
    dg.Definitions(
        assets=Pipeline(os.environ.get("BRANCHLAKE_TEST_NAMESPACE", "backfill"), factor=7).assets,
        sensors=[incremental_sensor()],
        executor=dg.in_process_executor,
    ),
)
