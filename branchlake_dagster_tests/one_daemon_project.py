"""The code location of test_one_daemon.py: pipelines of several subjects, and a job that waits."""

import os

import dagster as dg

from branchlake_dagster import Settings, branchlake_definitions, incremental_sensor
from branchlake_dagster.ingest.definitions import ingest_definitions
from branchlake_dagster_tests.automation.automation_project import (
    NAMESPACE,
    automation_definitions,
)
from branchlake_dagster_tests.incremental.backfill.stages import Pipeline
from branchlake_dagster_tests.ingest.histories.tokens import ingestion
from branchlake_dagster_tests.ingest.project import NAME, TOPICS
from branchlake_dagster_tests.launching.project import waiting

_ingest = ingestion(os.environ.get(TOPICS, "orders").split(","), os.environ.get(NAME, "orders"))

defs = branchlake_definitions(
    Settings(require_checks=False),
    dg.Definitions.merge(
        automation_definitions(os.environ.get(NAMESPACE, "automation")),
        ingest_definitions(_ingest, least_records=2, most_age_s=3_600, live_interval_s=0.2),
        dg.Definitions(
            # The pipeline as it was changed.
            assets=Pipeline(os.environ.get("BRANCHLAKE_TEST_NAMESPACE", "backfill"), factor=7).assets,
            jobs=[waiting],
            sensors=[incremental_sensor()],
            executor=dg.in_process_executor,
        ),
    ),
)
