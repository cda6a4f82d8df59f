"""The real publisher, with a note of what it was asked to publish."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from branchlake_dagster.nessie import NessieClient
from branchlake_dagster.publication.ledger import Candidate, MainLog, Result
from branchlake_dagster.publication.publisher import Publisher
from branchlake_dagster_tests.simulation.runs import Plan
from branchlake_dagster_tests.simulation.tables import SimulatedTables


class NotedPublisher(Publisher):
    """Notes the judged state of each candidate in its run's plan."""

    def __init__(
        self, client: NessieClient, tables: SimulatedTables, plans: Mapping[str, Plan], log: MainLog
    ) -> None:
        super().__init__(client, tables, log)
        self._plans = plans

    def publish(
        self, candidates: Sequence[Candidate], *, alive: Callable[[], None] = lambda: None
    ) -> dict[str, Result | Exception]:
        """As the publisher does."""
        for candidate in candidates:
            self._plans[candidate.run_id].heads.add(candidate.head_hash)
        return super().publish(candidates, alive=alive)
