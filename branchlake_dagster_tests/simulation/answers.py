"""The in-memory Nessie's refusals, in the words and codes of the real one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Key = tuple[str, ...]


def conflict(kind: str, key: Key | None, message: str) -> dict[str, Any]:
    """One conflict of a 409's details or of a merge's result."""
    return {"conflictType": kind, "key": {"elements": list(key)} if key else None, "message": message}


class Refusal(Exception):  # noqa: N818 - an answer, not an error of the server
    """An answer that is no 2xx."""

    def __init__(
        self, status: int, code: str, message: str, conflicts: Iterable[dict[str, Any]] = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.payload: dict[str, Any] = {"status": status, "message": message, "errorCode": code}
        if listed := list(conflicts):
            self.payload["errorDetails"] = {"type": "REFERENCE_CONFLICTS", "conflicts": listed}

    @classmethod
    def not_found(cls, message: str) -> Refusal:
        return cls(404, "REFERENCE_NOT_FOUND", message)

    @classmethod
    def bad(cls, message: str) -> Refusal:
        return cls(400, "BAD_REQUEST", message)

    @classmethod
    def conflicting(cls, conflicts: list[dict[str, Any]]) -> Refusal:
        return cls(409, "REFERENCE_CONFLICT", "; ".join(one["message"] for one in conflicts), conflicts)
