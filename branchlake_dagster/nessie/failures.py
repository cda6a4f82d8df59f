"""From an HTTP answer or a broken connection to the error that says what may be done next."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from typing import Any

import requests
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from branchlake_dagster.nessie import json_codec as codec
from branchlake_dagster.nessie.errors import (
    ContentNotFound,
    NessieAlreadyExists,
    NessieConflict,
    NessieError,
    NessieNotFound,
    NessieOutcomeUnknown,
    NessieRefused,
    NessieUnauthorized,
    NessieUnavailable,
    NotNessie,
    ReferenceNotFound,
)
from branchlake_dagster.nessie.model import KeyConflict

_LOOK_FIRST = "Look at the reference before repeating it."
REFUSED_HINT = "Set BRANCHLAKE_NESSIE_TOKEN to a token that permits this."
_NOT_NESSIE = "Is this the address of Nessie's API v2 (…/api/v2)?"


def _conflicts(payload: Mapping[str, Any]) -> tuple[KeyConflict, ...]:
    """The conflicts in `errorDetails`; servers older than spec 2.0 send none."""
    details = payload.get("errorDetails") or {}
    try:
        return tuple(codec.conflict(item) for item in details.get("conflicts") or ())
    except (KeyError, TypeError, ValueError):
        # A detail we cannot read must not hide the conflict itself.
        return ()


def from_answer(status: int, payload: object, *, action: str, changes: bool, server: str) -> NessieError:
    """The error for an answer that is no 2xx.

    `action` says in words what was asked ("delete branch x"), `changes` whether it changes something.
    Of the payload only `message`, `errorCode` and `errorDetails` are used, never `serverStackTrace`.
    """
    data: Mapping[str, Any] = payload if isinstance(payload, dict) else {}
    code = str(data["errorCode"]) if data.get("errorCode") else None
    said = str(data["message"]) if data.get("message") else "no reason given"
    text = f"Nessie at {server} did not {action}: {said} (HTTP {status})."
    if status in (401, 403):
        return NessieUnauthorized(text, status=status, code=code, hint=REFUSED_HINT)
    if status == 404:
        missing = {"REFERENCE_NOT_FOUND": ReferenceNotFound, "CONTENT_NOT_FOUND": ContentNotFound}
        hint = None if code else _NOT_NESSIE
        return missing.get(code or "", NessieNotFound)(text, status=status, code=code, hint=hint)
    if status == 409 and code == "REFERENCE_ALREADY_EXISTS":
        return NessieAlreadyExists(text, status=status, code=code)
    if status == 409:
        return NessieConflict(text, conflicts=_conflicts(data), status=status, code=code)
    if status == 429:
        return NessieUnavailable(text, status=status, code=code)
    if status >= 500:
        if changes:
            return NessieOutcomeUnknown(text, status=status, code=code, hint=_LOOK_FIRST)
        return NessieUnavailable(text, status=status, code=code)
    return NessieRefused(text, status=status, code=code, hint=_NOT_NESSIE if status < 400 else None)


def unreadable(status: int, body: str, *, action: str, changes: bool, server: str) -> NessieError:
    """The error for a 2xx whose body is not what the API promises.

    A read that was cut off on its way may simply be made again: nine of 21 failures of runs behind a lossy
    network were that. A page of HTML, or whole JSON of another shape, is not Nessie's.
    """
    text = f"Nessie at {server} was asked to {action} and gave an unreadable answer (HTTP {status})."
    if changes:
        return NessieOutcomeUnknown(text, status=status, hint=_LOOK_FIRST, reason="unreadable_answer")
    if _foreign(body):
        return NotNessie(text, status=status, hint=_NOT_NESSIE)
    return NessieUnavailable(text, status=status, reason="unreadable_answer")


def _foreign(body: str) -> bool:
    if body.lstrip("\ufeff \t\r\n")[:1] == "<":
        return True
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _chain(error: BaseException) -> list[BaseException]:
    """`error` and everything wrapped in it: requests and urllib3 nest by args, `reason` and cause."""
    found: list[BaseException] = []
    todo: list[object] = [error]
    while todo:
        item = todo.pop()
        if isinstance(item, BaseException) and item not in found:
            found.append(item)
            todo += [*item.args, getattr(item, "reason", None), getattr(item, "original_error", None)]
            todo += [item.__cause__, item.__context__]
    return found


def from_exception(
    error: requests.RequestException, *, action: str, changes: bool, server: str
) -> NessieError:
    """The error for a request that got no answer.

    Only a connection that was never made proves that a change was not applied. The exception itself is
    not kept: its `request` attribute holds the headers with the token.
    """
    chain = _chain(error)
    kinds = " / ".join(dict.fromkeys(type(item).__name__ for item in chain[:3]))
    text = f"Nessie at {server} could not be asked to {action}: {kinds}."
    if any(isinstance(item, ssl.SSLCertVerificationError) for item in chain):
        return NessieRefused(
            text, hint="The server's certificate is not trusted: set the CA bundle.", reason="certificate"
        )
    if any(isinstance(item, NewConnectionError | ConnectTimeoutError) for item in chain):
        return NessieUnavailable(
            text, hint="Is the server running and the address right?", reason="no_connection"
        )
    if changes:
        lost = f"Nessie at {server} was asked to {action} and the answer was lost: {kinds}."
        return NessieOutcomeUnknown(lost, hint=_LOOK_FIRST)
    return NessieUnavailable(text)
