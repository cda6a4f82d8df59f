"""HTTP to one Nessie server: authentication, TLS, timeouts, one kept connection per thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urlsplit

import requests

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.nessie import failures
from branchlake_dagster.nessie.errors import NessieError, NessieOutcomeUnknown, NessieUnavailable
from branchlake_dagster.nessie.retry import Breaker

T = TypeVar("T")

# Without this header the server leaves `errorDetails` out, and a conflict names no keys.
_CLIENT_SPEC = {"Nessie-Client-Spec": "2", "Accept": "application/json"}


def validate_uri(uri: str) -> str:
    """The API v2 base address without a trailing slash; raises ConfigurationError for anything else."""
    parts = urlsplit(uri)
    if parts.username is not None or parts.password is not None:
        raise ConfigurationError(
            "The Nessie URI holds credentials, which would end in logs.",
            hint="Use the token setting.",
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
        # Without its query: some put a token there.
        shown_uri = parts._replace(query="", fragment="").geturl()
        raise ConfigurationError(
            f"{shown_uri!r} is no address of Nessie's API v2.",
            hint="Example: http://127.0.0.1:19120/api/v2",
            reason="not_api_v2",
            subject=shown_uri,
        )
    return f"{parts.scheme}://{parts.netloc}{path}"


def validate_token(token: str | None) -> str | None:
    """The token without surrounding white space.

    A token file usually ends in a newline, and requests then prints the whole header in its error.
    """
    if token is None:
        return None
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigurationError(
            "The Nessie token is empty or has characters that no HTTP header can carry.",
            hint="Give the bare token, without 'Bearer'.",
        )
    return token


def validate_verify(verify: bool | str) -> bool | str:
    """`verify` as requests takes it; raises ConfigurationError for a CA bundle that is not there."""
    if isinstance(verify, str) and not Path(verify).exists():
        raise ConfigurationError(
            f"There is no CA bundle at {verify}.",
            hint="Give a PEM file or a folder.",
            reason="ca_bundle_missing",
            subject=verify,
        )
    return verify


def _bearer_auth(token: str) -> requests.auth.AuthBase:
    from branchlake_dagster.nessie.pynessie_parts import TokenAuth  # late: 0.4 s

    auth: requests.auth.AuthBase = TokenAuth(token)
    return auth


class Transport(Protocol):
    """What the client needs of the wire; every failure comes out as a NessieError."""

    @property
    def uri(self) -> str:
        """The API's base address."""
        ...

    def close(self) -> None:
        """Release what is kept between calls."""
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
        """One request to `uri/path`; the decoded JSON of a 2xx answer."""
        ...


class GuardedTransport:
    """Another transport behind a breaker: a Nessie that fails is left alone for seconds.

    Otherwise a hundred waiting runs ask a server that is starting for all it has, each four times.
    """

    def __init__(self, inner: Transport, breaker: Breaker) -> None:
        self._inner = inner
        self._breaker = breaker

    @property
    def uri(self) -> str:
        """The API's base address."""
        return self._inner.uri

    def close(self) -> None:
        """Release what is kept between calls."""
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
        """As the other one, or NessieUnavailable at once: nothing was sent."""
        if wait := self._breaker.seconds_to_wait():
            raise NessieUnavailable(
                f"Nessie at {self.uri} was not asked to {action}: most of its last answers were failures.",
                hint=f"It is asked again in {wait:.1f} s.",
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
    """Sends requests and turns every failure into a NessieError; knows nothing of Nessie's objects.

    `verify` is True, False, or the path of a CA bundle. Timeouts are in seconds; the read timeout is the
    longest silence, not the length of a whole call. Safe to share between threads.
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
        self._timeout = (connect_timeout_s, read_timeout_s)
        self._local = threading.local()
        self._sessions: list[requests.Session] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"HttpTransport({self.uri})"

    def close(self) -> None:
        """Close every thread's connections; the next call opens new ones."""
        with self._lock:
            sessions, self._sessions = self._sessions, []
            self._local = threading.local()
        for session in sessions:
            session.close()

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = requests.Session()
            session.headers.update(_CLIENT_SPEC)
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
        """One request to `uri/path`; the decoded JSON of a 2xx answer, or the NessieError that fits.

        `changes` tells whether the server's state may differ afterwards: it decides between
        "unavailable" and "outcome unknown". A POST that only reads passes False.
        """
        failure: NessieError
        try:
            # verify goes with each call: REQUESTS_CA_BUNDLE overrides a session's own setting.
            # Redirects are not followed: requests turns a redirected POST into a GET.
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
            failure = failures.error_from_exception(error, action=action, changes=changes, server=self.uri)
        else:
            if 200 <= answer.status_code < 300:
                try:
                    return decode(answer.json())
                except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
                    failure = failures.error_from_unreadable(
                        answer.status_code, answer.text, action=action, changes=changes, server=self.uri
                    )
            else:
                failure = failures.error_from_answer(
                    answer.status_code,
                    self._error_payload(answer),
                    action=action,
                    changes=changes,
                    server=self.uri,
                )
        # Raised out here so that no requests exception, whose request carries the token, is its context.
        raise failure

    def _error_payload(self, answer: requests.Response) -> object:
        """The JSON of an error answer with our token blotted out, in case the server echoes it."""
        try:
            return _redact(json.loads(answer.text), self._secret)
        except ValueError:
            return None


def _redact(data: object, secret: str | None) -> object:
    """JSON data without the secret. Not the text of it: that may hold the secret in escapes."""
    if secret is None:
        return data
    if isinstance(data, str):
        return data.replace(secret, "***").replace(quote(secret, safe=""), "***")
    if isinstance(data, list):
        return [_redact(item, secret) for item in data]
    if isinstance(data, dict):
        return {_redact(key, secret): _redact(value, secret) for key, value in data.items()}
    return data
