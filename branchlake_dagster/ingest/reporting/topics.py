"""The external assets that stand for topics."""

from __future__ import annotations

import dagster as dg

from branchlake_dagster.ingest.declaring.declaration import Ingest


def topic_key(ingest: Ingest, topic: str) -> dg.AssetKey:
    """The external asset that stands for a topic. Kafka's names may hold dots, Dagster's parts too."""
    return dg.AssetKey([ingest.source, topic])


def topic_spec(ingest: Ingest, topic: str) -> dg.AssetSpec:
    """That asset."""
    if ingest.source == "landing":
        text = f"The topic {topic} of the landing folder, as its receiver fills it."
        return dg.AssetSpec(
            topic_key(ingest, topic), description=text, kinds={"parquet"}, group_name="landing"
        )
    return dg.AssetSpec(
        topic_key(ingest, topic),
        description=f"The Kafka topic {topic}.",
        kinds={"kafka"},
        group_name="kafka",
    )
