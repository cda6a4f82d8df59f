"""Convert an HTTP answer or a broken connection into the NessieError that shows whether to retry."""

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

_READ_FIRST_HINT = "Read the reference's log before you repeat the change."
TOKEN_HINT = "Set BRANCHLAKE_NESSIE_TOKEN to a token that permits this."  # noqa: S105 - a hint, not a token
_NOT_NESSIE_HINT = "Check that BRANCHLAKE_NESSIE_URI is the address of Nessie's API v2 (…/api/v2)."


def _parse_conflicts(payload: Mapping[str, Any]) -> tuple[KeyConflict, ...]:
    """Parse the conflicts in `errorDetails`. Servers older than spec 2.0 send none."""
    details = payload.get("errorDetails") or {}
    try:
        return tuple(codec.parse_conflict(item) for item in details.get("conflicts") or ())
    except (KeyError, TypeError, ValueError):
        # An unreadable detail must not hide the conflict itself.
        return ()


def error_from_answer(
    status: int, payload: object, *, action: str, changes: bool, server: str
) -> NessieError:
    """Return the error for an answer whose status is not 2xx.

    `action` is the request as text ("delete branch x"). `changes` is whether the request changes something.
    Only `message`, `errorCode` and `errorDetails` of the payload are used, never `serverStackTrace`.
    """
    data: Mapping[str, Any] = payload if isinstance(payload, dict) else {}
    code = str(data["errorCode"]) if data.get("errorCode") else None
    server_message = str(data["message"]) if data.get("message") else "no reason given"
    message = f"Nessie at {server} did not {action}: {server_message} (HTTP {status})."
    if status in (401, 403):
        return NessieUnauthorized(message, status=status, code=code, hint=TOKEN_HINT)
    if status == 404:
        missing = {"REFERENCE_NOT_FOUND": ReferenceNotFound, "CONTENT_NOT_FOUND": ContentNotFound}
        hint = None if code else _NOT_NESSIE_HINT
        return missing.get(code or "", NessieNotFound)(message, status=status, code=code, hint=hint)
    if status == 409 and code == "REFERENCE_ALREADY_EXISTS":
        return NessieAlreadyExists(message, status=status, code=code)
    if status == 409:
        return NessieConflict(message, conflicts=_parse_conflicts(data), status=status, code=code)
    if status == 429:
        return NessieUnavailable(message, status=status, code=code)
    if status >= 500:
        if changes:
            return NessieOutcomeUnknown(message, status=status, code=code, hint=_READ_FIRST_HINT)
        return NessieUnavailable(message, status=status, code=code)
    return NessieRefused(message, status=status, code=code, hint=_NOT_NESSIE_HINT if status < 400 else None)


def error_from_unreadable(status: int, body: str, *, action: str, changes: bool, server: str) -> NessieError:
    """Return the error for a 2xx answer whose body is not what the API promises.

    A truncated read may be repeated: nine of 21 failed runs behind a lossy network failed by one. A page of
    HTML, or complete JSON of another shape, does not come from Nessie.
    """
    message = f"Nessie at {server} was asked to {action}, and its answer is unreadable (HTTP {status})."
    if changes:
        return NessieOutcomeUnknown(message, status=status, hint=_READ_FIRST_HINT, reason="unreadable_answer")
    if _is_complete_answer(body):
        return NotNessie(message, status=status, hint=_NOT_NESSIE_HINT)
    return NessieUnavailable(message, status=status, reason="unreadable_answer")


def _is_complete_answer(body: str) -> bool:
    if body.lstrip("\ufeff \t\r\n")[:1] == "<":
        return True
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _error_chain(error: BaseException) -> list[BaseException]:
    """List `error` and the errors inside it: requests and urllib3 nest them in args, `reason` and causes."""
    chain: list[BaseException] = []
    pending: list[object] = [error]
    while pending:
        item = pending.pop()
        if isinstance(item, BaseException) and item not in chain:
            chain.append(item)
            pending += [*item.args, getattr(item, "reason", None), getattr(item, "original_error", None)]
            pending += [item.__cause__, item.__context__]
    return chain


def error_from_exception(
    error: requests.RequestException, *, action: str, changes: bool, server: str
) -> NessieError:
    """Return the error for a request without an answer.

    Only a connection that was never opened proves that a change was not applied. The exception itself is not
    kept: its `request` attribute contains the headers with the token.
    """
    chain = _error_chain(error)
    kinds = " / ".join(dict.fromkeys(type(item).__name__ for item in chain[:3]))
    message = f"Nessie at {server} could not be asked to {action}: {kinds}."
    if any(isinstance(item, ssl.SSLCertVerificationError) for item in chain):
        return NessieRefused(
            message,
            hint="The server's certificate is not trusted. Set BRANCHLAKE_NESSIE_VERIFY_TLS to a CA bundle.",
            reason="certificate",
        )
    if any(isinstance(item, NewConnectionError | ConnectTimeoutError) for item in chain):
        return NessieUnavailable(
            message,
            hint="Check that the server runs and that BRANCHLAKE_NESSIE_URI is its address.",
            reason="no_connection",
        )
    if changes:
        lost_message = f"Nessie at {server} was asked to {action}, and its answer was lost: {kinds}."
        return NessieOutcomeUnknown(lost_message, hint=_READ_FIRST_HINT)
    return NessieUnavailable(message)
