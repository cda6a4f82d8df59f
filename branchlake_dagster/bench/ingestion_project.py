"""The code location of the ingestion benchmark. The environment variable BENCH_TOPIC names the topic."""

import os

import dagster as dg

from branchlake_dagster.bench.kafka_feed import COLUMNS
from branchlake_dagster.bench.time_to_visibility import OFFSET_COLUMNS
from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.definitions import ingest_definitions
from branchlake_dagster.lake_definitions import branchlake_definitions

TOPIC = "BENCH_TOPIC"
NAME = "benched"
TABLE = (NAME, "all")

_table = IngestTable(
    key=[*TABLE], columns=COLUMNS, attributes=dict(zip(OFFSET_COLUMNS, ("partition", "offset"), strict=True))
)


@dg.definitions
def defs() -> dg.Definitions:
    """Build the definitions lazily, because this module is also imported without the extra `[kafka]`."""
    ingest = Ingest(name=NAME, topics=[os.environ.get(TOPIC, NAME)], tables=[_table])
    return branchlake_definitions(
        definitions=dg.Definitions.merge(
            ingest_definitions(ingest), dg.Definitions(executor=dg.in_process_executor)
        )
    )
