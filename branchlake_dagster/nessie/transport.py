"""Sends HTTP requests to one Nessie server, and converts failed requests into errors.

`HttpTransport` handles authentication, TLS and timeouts, and has one connection pool per thread. An HTTP
answer or a broken connection is converted into the NessieError that shows whether to retry.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urlsplit

import requests
from pydantic_core import from_json
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.nessie import json_codec as codec
from branchlake_dagster.nessie.errors import (
    Breaker,
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
    """Parse the conflicts in `errorDetails`. Empty if they cannot be parsed or the server sent none.

    Servers older than spec 2.0 send none.
    """
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
    if status < 400:
        return NessieRefused(message, status=status, code=code, hint=_NOT_NESSIE_HINT)
    if code is None and not data.get("message"):
        return _error_from_empty_refusal(status, message, changes=changes)
    return NessieRefused(message, status=status, code=code)


def _error_from_empty_refusal(status: int, message: str, *, changes: bool) -> NessieError:
    """Return the error for a 4xx answer without Nessie's reason.

    Nessie gives a reason with each refusal. Its HTTP server (Vert.x) answers 400 without a body if it cannot
    read the request line, and a proxy answers 408 or 499 if it gave up waiting, perhaps for Nessie.
    """
    if status in (408, 499):
        if changes:
            return NessieOutcomeUnknown(message, status=status, hint=_READ_FIRST_HINT)
        return NessieUnavailable(message, status=status)
    return NotNessie(message, status=status, hint=_NOT_NESSIE_HINT)


def error_from_unreadable(status: int, body: str, *, action: str, changes: bool, server: str) -> NessieError:
    """Return the error for a 2xx answer whose body cannot be decoded as the API specifies.

    If the request changes something, the outcome is unknown. A truncated answer to a read may be requested
    again: nine of 21 failed runs behind a lossy network failed by one. A page of HTML, or complete JSON of
    another shape, does not come from Nessie.
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
    """Return the error for a request that got no answer.

    Only a connection that was never opened proves that a change was not applied. The returned error does not
    refer to the exception: its `request` attribute contains the headers with the token.
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


T = TypeVar("T")

# Without this header the server omits `errorDetails`, and a conflict names no keys.
_CLIENT_SPEC = {"Nessie-Client-Spec": "2", "Accept": "application/json"}


def validate_uri(uri: str) -> str:
    """Return the address of Nessie's API v2 without a trailing slash.

    Raises ConfigurationError if `uri` is not such an address or contains credentials.
    """
    parts = urlsplit(uri)
    if parts.username is not None or parts.password is not None:
        raise ConfigurationError(
            "The Nessie URI contains credentials, which would appear in logs.",
            hint="Remove them, and set BRANCHLAKE_NESSIE_TOKEN.",
            reason="credentials_in_address",
        )
    path = parts.path.rstrip("/")
    is_plain = not parts.query and not parts.fragment
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not path.endswith("/v2")
        or not is_plain
    ):
        # The message omits the query, because the query may contain a token.
        shown_uri = parts._replace(query="", fragment="").geturl()
        raise ConfigurationError(
            f"{shown_uri!r} is not an address of Nessie's API v2.",
            hint="Example: http://127.0.0.1:19120/api/v2",
            reason="not_api_v2",
            subject=shown_uri,
        )
    return f"{parts.scheme}://{parts.netloc}{path}"


def validate_token(token: str | None) -> str | None:
    """Return the token without surrounding white space. Raises ConfigurationError if it is not valid.

    A token file usually ends in a newline. requests would then print the whole header in its error.
    """
    if token is None:
        return None
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigurationError(
            "The Nessie token is empty or contains characters that are not allowed in an HTTP header.",
            hint="Set BRANCHLAKE_NESSIE_TOKEN to the bare token, without 'Bearer'.",
        )
    return token


def validate_verify(verify: bool | str) -> bool | str:
    """Return `verify` unchanged. Raises ConfigurationError if it is the path of a missing CA bundle."""
    if isinstance(verify, str) and not Path(verify).exists():
        raise ConfigurationError(
            f"The CA bundle {verify} does not exist.",
            hint="Set BRANCHLAKE_NESSIE_VERIFY_TLS to a PEM file or a folder of them.",
            reason="ca_bundle_missing",
            subject=verify,
        )
    return verify


def _bearer_auth(token: str) -> requests.auth.AuthBase:
    from branchlake_dagster.nessie.pynessie_parts import TokenAuth  # late import: 0.4 s

    auth: requests.auth.AuthBase = TokenAuth(token)
    return auth


class Transport(Protocol):
    """The interface to the server that the client needs. Every failure is raised as a NessieError."""

    @property
    def uri(self) -> str:
        """Return the API's base address."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...

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
        """Send one request to `uri/path`; return the result of `decode` for the JSON of a 2xx answer.

        `action` describes the request in errors, for example "delete branch x". `changes` is whether the
        request may change the server's state.
        """
        ...


class GuardedTransport:
    """A transport with a circuit breaker: it sends nothing to a failing Nessie for some seconds.

    Otherwise a hundred waiting runs would send all their requests, each four times, to a starting server.
    """

    def __init__(self, inner: Transport, breaker: Breaker) -> None:
        self._inner = inner
        self._breaker = breaker

    @property
    def uri(self) -> str:
        """Return the API's base address."""
        return self._inner.uri

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()

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
        """Send one request by the inner transport, see `Transport.send`.

        Raises NessieUnavailable if the breaker blocks the request, and the errors of the inner transport.
        """
        if wait := self._breaker.seconds_to_wait():
            raise NessieUnavailable(
                f"Nessie at {self.uri} was not asked to {action}, because most of its last answers failed.",
                hint=f"Requests are sent again in {wait:.1f} s.",
                reason="not_asked",
            )
        failed = True
        try:
            answer = self._inner.send(
                method, path, decode, action=action, changes=changes, params=params, body=body
            )
            failed = False
        except NessieError as error:
            failed = isinstance(error, NessieUnavailable | NessieOutcomeUnknown)
            raise
        finally:
            self._breaker.record_result(failed=failed)
        return answer


class HttpTransport:
    """Sends HTTP requests to Nessie, and raises their failures as NessieError.

    This class does not depend on Nessie's references and contents. `verify` is True, False, or the path of a
    CA bundle. Timeouts are in seconds. The read timeout limits the time without data, not the duration of the
    whole call. Threads may share a transport.
    """

    def __init__(
        self,
        uri: str,
        *,
        token: str | None,
        verify: bool | str,
        connect_timeout_s: float,
        read_timeout_s: float,
    ) -> None:
        self.uri = validate_uri(uri)
        token = validate_token(token)
        self._auth = _bearer_auth(token) if token else None
        self._secret = token
        self._verify = validate_verify(verify)
        self._is_loopback = urlsplit(self.uri).hostname in ("127.0.0.1", "localhost", "::1")
        self._timeout = (connect_timeout_s, read_timeout_s)
        self._sessions: list[requests.Session] = []
        # Reentrant: a finalizer that runs while this thread holds the lock may call Nessie.
        self._lock = threading.RLock()
        self._forget_sessions()

    def __repr__(self) -> str:
        return f"HttpTransport({self.uri})"

    def close(self) -> None:
        """Close the connections of all threads. The next call opens new ones."""
        with self._lock:
            sessions, self._sessions = self._sessions, []
            self._local = threading.local()
        for session in sessions:
            session.close()

    def _forget_sessions(self) -> None:
        """Start without connections in this process. Those of a parent process stay open for the parent."""
        self._process_id = os.getpid()
        self._local = threading.local()
        self._sessions = []
        self._lock = threading.RLock()

    def _session(self) -> requests.Session:
        """Return the session of this thread, with its own connection.

        A process that was forked gets new sessions: on a connection that two processes use, each could get
        the answers to the other's requests.
        """
        if self._process_id != os.getpid():
            self._forget_sessions()
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = requests.Session()
            session.headers.update(_CLIENT_SPEC)
            if self._is_loopback:
                session.headers["Accept-Encoding"] = "identity"  # compression took a quarter of a long log
            with self._lock:
                self._sessions.append(session)
                self._local.session = session
        return session

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
        """Send one request to `uri/path`; return the result of `decode` for the JSON of a 2xx answer.

        `changes` is whether the request may change the server's state. It decides between NessieUnavailable
        and NessieOutcomeUnknown. A POST that only reads passes False. Raises NessieError.
        """
        failure: NessieError
        try:
            # `verify` is passed with each call, because REQUESTS_CA_BUNDLE overrides a session's own setting.
            # Redirects are not followed, because requests turns a redirected POST into a GET.
            answer = self._session().request(
                method,
                f"{self.uri}/{path}",
                params=dict(params or {}),
                json=body,
                auth=self._auth,
                verify=self._verify,
                timeout=self._timeout,
                allow_redirects=False,
            )
        except requests.RequestException as error:
            failure = error_from_exception(error, action=action, changes=changes, server=self.uri)
        else:
            if 200 <= answer.status_code < 300:
                try:
                    return decode(from_json(answer.content))
                except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
                    failure = error_from_unreadable(
                        answer.status_code, answer.text, action=action, changes=changes, server=self.uri
                    )
            else:
                failure = error_from_answer(
                    answer.status_code,
                    self._error_payload(answer),
                    action=action,
                    changes=changes,
                    server=self.uri,
                )
        # The error is raised outside the except block: its context would otherwise be the requests exception,
        # whose request contains the token.
        raise failure

    def _error_payload(self, answer: requests.Response) -> object:
        """Return the JSON of an error answer with the token redacted, in case the server echoes it."""
        try:
            return _redact(json.loads(answer.text), self._secret)
        except ValueError:
            return None


def _redact(data: object, secret: str | None) -> object:
    """Return decoded JSON with the secret replaced by `***` in every string.

    Replacing it in the raw text is not enough, because JSON escapes could hide it.
    """
    if secret is None:
        return data
    if isinstance(data, str):
        return data.replace(secret, "***").replace(quote(secret, safe=""), "***")
    if isinstance(data, list):
        return [_redact(item, secret) for item in data]
    if isinstance(data, dict):
        return {_redact(key, secret): _redact(value, secret) for key, value in data.items()}
    return data
