"""The code location of test_backfill_by_daemon.py: the pipeline as it was changed."""

import os
from pathlib import Path

import dagster as dg

from branchlake_dagster import Settings, branchlake_definitions, incremental_sensor
from branchlake_dagster_tests.incremental.backfill.stages import Pipeline

_BROKEN = os.environ.get("BRANCHLAKE_TEST_BROKEN")
_PIPELINE = Pipeline(
    os.environ.get("BRANCHLAKE_TEST_NAMESPACE", "backfill"),
    factor=7,
    broken_while=Path(_BROKEN) if _BROKEN else None,
)

defs = branchlake_definitions(
    Settings(require_checks=False),
    dg.Definitions(
        assets=_PIPELINE.assets,
        sensors=[incremental_sensor()],
        executor=dg.in_process_executor,
    ),
)
