"""The wire between the real client and the in-memory Nessie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from branchlake_dagster.nessie import transport
from branchlake_dagster_tests.simulation.nessie import InMemoryNessie

T = TypeVar("T")


class DirectTransport:
    """Answers at once, loses nothing."""

    uri = "http://in.memory/api/v2"

    def __init__(self, server: InMemoryNessie) -> None:
        self.server = server

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
        status, payload = self.server.answer(method, path, params or {}, body)
        if status == 200:
            return decode(payload)
        raise transport.error_from_answer(status, payload, action=action, changes=changes, server=self.uri)
