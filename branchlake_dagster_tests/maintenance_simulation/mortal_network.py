"""The wire to the in-memory Nessie, on which a killed process sends nothing more."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from branchlake_dagster.nessie import NessieClient, RetryPolicy
from branchlake_dagster_tests.simulation.faults import Fault, Faults
from branchlake_dagster_tests.simulation.nessie import Answer, InMemoryNessie
from branchlake_dagster_tests.simulation.network import Network, _Wire
from branchlake_dagster_tests.simulation.scheduler import Clock, Died, Scheduler


class MortalNetwork(Network):
    """As `Network`. Requests outside of actors have no faults.

    `on_change` is called after the server has answered a request that changes something.
    """

    def __init__(
        self,
        server: InMemoryNessie,
        faults: Faults,
        scheduler: Scheduler,
        clock: Clock,
        random: Random,
        on_change: Callable[[], None],
    ) -> None:
        super().__init__(server, faults, scheduler, clock)
        self._on_change = on_change
        self._dead_actors: set[str] = set()
        self._random = random
        self.lost_share = random.choice((0.0, 0.1, 0.3))
        """The share of commits to `main` whose reply is lost, besides the other faults."""

    def named_client(self, uri: str, retry: RetryPolicy) -> NessieClient:
        """Return a client whose address is `uri`."""
        wire = _Wire(self)
        wire.uri = uri
        return NessieClient(uri, transport=wire, retry=retry, sleep=self.sleep)

    def require_alive(self) -> None:
        """Raise Died if the present actor was killed: its `finally` blocks never ran."""
        if self._scheduler.current in self._dead_actors:
            raise Died

    def kill(self) -> None:
        """Kill the present actor."""
        self._dead_actors.add(self._scheduler.current)
        raise Died

    def exchange(self, action: str, changes: bool, deliver: Callable[[], Answer]) -> Answer:
        """Return the answer to one request; raise what the real transport would, or Died."""

        def deliver_and_check() -> Answer:
            answer = deliver()
            if changes:
                self._on_change()
            return answer

        if not self._scheduler.current:
            return deliver_and_check()
        self.require_alive()
        try:
            if action == "commit to main" and self.lost_share and self._random.random() < self.lost_share:
                self._scheduler.pause()
                return self._suffer(Fault.LOST, action, changes, deliver_and_check)
            return super().exchange(action, changes, deliver_and_check)
        except Died:
            self._dead_actors.add(self._scheduler.current)
            raise
