"""Records that each carry a token, and where the tokens have come to."""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from branchlake_dagster.ingest.declaration import Ingest, IngestTable
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster_tests.suite.kafka import Broker, Message

KINDS = ("a", "b")
DEAD = "dead letters"
PARTITIONS = 2
_COLUMNS = {"id": "bigint", "kind": "string"}


def ingestion(topics: Sequence[str], name: str = "", *, most_records: int = 500_000) -> Ingest:
    """Two tables by the records' kind, and the dead letters; a table that was rolled back is filled again."""
    name = name or f"i{uuid.uuid4().hex[:8]}"
    tables = [
        IngestTable(key=[name, kind], columns=_COLUMNS, route=kind, attributes={"offset_": "offset"})
        for kind in KINDS
    ]
    return Ingest(
        name=name,
        topics=topics,
        tables=tables,
        route_by="kind",
        on_rollback="replay",
        most_records=most_records,
    )


@dataclass
class Tokens:
    """What was sent, by token the place where it belongs."""

    topics: Sequence[str]
    random: Random
    belongs: dict[int, str] = field(default_factory=dict)

    def more(self, count: int, *, poison: float = 0.1) -> list[tuple[str, Message]]:
        """The next records, each for a topic and partition by chance."""
        return [self._one(poison) for _ in range(count)]

    def send(self, kafka: Broker, count: int, *, poison: float = 0.1) -> None:
        """Put the next records into their topics."""
        told = self.more(count, poison=poison)
        for topic in self.topics:
            kafka.send(topic, [message for to, message in told if to == topic])

    def _one(self, poison: float) -> tuple[str, Message]:
        token = len(self.belongs) + 1
        kind = self.random.choice(KINDS)
        good = self.random.random() >= poison
        self.belongs[token] = kind if good else DEAD
        bad = [
            f"no JSON {token}",
            json.dumps({"id": f"x{token}", "kind": kind}),
            json.dumps({"id": token, "kind": "nobody's"}),
        ]
        text = json.dumps({"id": token, "kind": kind}) if good else self.random.choice(bad)
        message = Message(text.encode(), partition=self.random.randrange(PARTITIONS))
        return self.random.choice(self.topics), message

    def problems(self, lake: Lakehouse, ingest: Ingest) -> list[str]:
        """What is not as it should be on `main`, in sentences; empty when each token is there exactly once."""
        found: Counter[tuple[int, str]] = Counter()
        catalog = lake.catalog(MAIN)
        for kind in KINDS:
            if catalog.table_exists((ingest.name, kind)):
                ids = catalog.load_table((ingest.name, kind)).scan(selected_fields=("id",)).to_arrow()
                found.update((token, kind) for token in ids["id"].to_pylist())
        letters = (ingest.name, f"{ingest.name}_dead_letters")
        if catalog.table_exists(letters):
            values = catalog.load_table(letters).scan(selected_fields=("value",)).to_arrow()["value"]
            found.update((int(re.findall(rb"\d+", one)[0]), DEAD) for one in values.to_pylist())
        wanted = Counter((token, place) for token, place in self.belongs.items())
        lost, more = wanted - found, found - wanted
        told = [f"{len(lost)} tokens lost: {sorted(lost)[:10]}"] if lost else []
        return told + ([f"{more.total()} tokens too many: {sorted(more.items())[:10]}"] if more else [])
