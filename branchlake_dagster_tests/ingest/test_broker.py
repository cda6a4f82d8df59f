"""What the embedded broker is started with."""

from __future__ import annotations

import uuid

from branchlake_dagster.ingest.kafka.broker import new_cluster_id


def test_the_id_of_a_cluster_is_never_taken_for_an_option() -> None:
    """Kafka's command line refused it: "argument --cluster-id/-t: expected one argument"."""
    drawn = [uuid.UUID(bytes=bytes([first]) + bytes(15)) for first in (0xF8, 0xFB, 0xFC)]
    assert new_cluster_id(iter(drawn).__next__) == "_AAAAAAAAAAAAAAAAAAAAA"
