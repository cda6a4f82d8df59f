"""The wire between real clients and the in-memory Nessie, with its faults and the turns of other actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import requests
from urllib3.exceptions import NewConnectionError

from branchlake_dagster.nessie import NessieClient, RetryPolicy, transport
from branchlake_dagster_tests.simulation.faults import Fault, Faults
from branchlake_dagster_tests.simulation.nessie import Answer, InMemoryNessie
from branchlake_dagster_tests.simulation.scheduler import Clock, Died, Scheduler

T = TypeVar("T")
URI = "http://in.memory/api/v2"

_REFUSED = requests.ConnectionError(NewConnectionError(None, "refused"))
_LOST = requests.ConnectionError("connection reset")
_STATUS = {Fault.OVERLOADED: 429, Fault.FAILED: 503, Fault.FAILED_LATE: 500}


class Network:
    """Brings requests to the server. `trace` tells what happened, one line each."""

    def __init__(self, server: InMemoryNessie, faults: Faults, scheduler: Scheduler, clock: Clock) -> None:
        self.trace: list[tuple[str, str, str]] = []
        self._server = server
        self._faults = faults
        self._scheduler = scheduler
        self._clock = clock
        self._under_way: list[tuple[float, str, Callable[[], Answer]]] = []

    def client(self, retry: RetryPolicy) -> NessieClient:
        """A client of its own for an actor."""
        return NessieClient("", transport=_Wire(self), retry=retry, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        """Time passes, and others go on."""
        self._clock.advance(seconds)
        self._scheduler.pause()

    def note(self, what: str, how: str = "") -> None:
        """A line of the trace."""
        self.trace.append((self._scheduler.current, what, how))

    def flush(self) -> None:
        """Everything that is still under way arrives."""
        self._arrive(float("inf"))

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way that its sender has given up."""
        return bool(self._under_way)

    def _arrive(self, now: float) -> None:
        for late in [one for one in self._under_way if one[0] <= now]:
            self._under_way.remove(late)
            _, what, deliver = late
            self.note(f"late: {what}", _told(deliver()))

    def exchange(
        self,
        action: str,
        changes: bool,
        deliver: Callable[[], Answer],
    ) -> Answer:
        """The answer to one request; raises what the real transport would, or Died."""
        self._scheduler.pause()
        self._arrive(self._clock.monotonic())
        fault = self._faults.draw(changes=changes)
        answer = self._suffer(fault, action, changes, deliver)
        self.note(action, f"{fault}, {_told(answer)}" if fault is not Fault.NONE else _told(answer))
        if changes:
            self._scheduler.pause()
        return answer

    def _suffer(self, fault: Fault, action: str, changes: bool, deliver: Callable[[], Answer]) -> Answer:
        match fault:
            case Fault.NONE:
                return deliver()
            case Fault.SLOW:
                self._clock.advance(20.0)
                self._scheduler.pause()
                return deliver()
            case Fault.CONTENTION:
                return 409, {"errorCode": "REFERENCE_CONFLICT", "message": "retries exhausted"}
            case Fault.OVERLOADED | Fault.FAILED | Fault.FAILED_LATE:
                if fault is Fault.FAILED_LATE:
                    deliver()
                return _STATUS[fault], {"message": str(fault)}
            case Fault.LOST | Fault.DEATH_AFTER:
                told = _told(deliver())
            case Fault.DELAYED:
                told = "on its way"
                self._under_way.append((self._clock.monotonic() + self._faults.delay(), action, deliver))
            case _:
                told = "not sent"
        self.note(action, f"{fault} ({told})")
        if fault in (Fault.DEATH_BEFORE, Fault.DEATH_AFTER):
            raise Died
        self._scheduler.pause()
        error = _REFUSED if fault is Fault.REFUSED else _LOST
        raise transport.error_from_exception(error, action=action, changes=changes, server=URI)

    def answer(self, method: str, path: str, params: Mapping[str, str], body: Any) -> Answer:
        """What the server says, without faults."""
        return self._server.answer(method, path, params, body)


def _told(answer: Answer) -> str:
    status, payload = answer
    return "" if status == 200 else f"{status} {payload['message']}"


class _Wire:
    """A client's end."""

    uri = URI

    def __init__(self, network: Network) -> None:
        self._network = network

    def close(self) -> None:
        """There is nothing to close."""

    def send(
        self,
        method: str,
        path: str,
        decode: Callable[[Any], T],
        *,
        action: str,
        changes: bool,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> T:
        """As the real transport's."""
        status, payload = self._network.exchange(
            action, changes, lambda: self._network.answer(method, path, params or {}, body)
        )
        if status == 200:
            return decode(payload)
        raise transport.error_from_answer(status, payload, action=action, changes=changes, server=URI)
