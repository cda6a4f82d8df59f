"""A code location with one ingestion, whose name and topics the environment tells."""

import os

import dagster as dg

from branchlake_dagster.ingest.definitions import ingest_definitions
from branchlake_dagster.lake_definitions import branchlake_definitions
from branchlake_dagster_tests.ingest.histories.tokens import ingestion

NAME, TOPICS = "TEST_INGESTION", "TEST_TOPICS"
"""In the environment; topics by commas."""

ingest = ingestion(os.environ.get(TOPICS, "orders").split(","), os.environ.get(NAME, "orders"))
defs = branchlake_definitions(
    definitions=dg.Definitions.merge(
        ingest_definitions(ingest, least_records=2, most_age_s=3_600, live_interval_s=0.2),
        dg.Definitions(executor=dg.in_process_executor),
    )
)
