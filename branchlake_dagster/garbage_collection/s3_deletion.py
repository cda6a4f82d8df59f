"""Delete objects of an S3 store by requests that name up to 1,000 of them (`DeleteObjects`).

PyArrow needs three requests for each file, and leaves an empty object for a folder that has become empty.

Source of the requests: Amazon S3 API reference, `DeleteObjects`, and AWS Signature Version 4.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import urllib3

MAX_KEYS = 1_000
"""The most keys of one request."""
_TIMEOUT = urllib3.Timeout(connect=10, read=60)
_SCHEMES = frozenset({"s3", "s3a", "s3n"})
_OTHER_ACCESS = ("s3.role-arn", "s3.anonymous", "s3.proxy-uri", "s3.signer", "client.role-arn")
"""FileIO properties of ways to reach a store that these requests do not have."""
_UNSENT = (
    urllib3.exceptions.SSLError,
    urllib3.exceptions.NewConnectionError,
    urllib3.exceptions.ConnectTimeoutError,
    urllib3.exceptions.LocationValueError,
)
"""Errors before the request is sent. PyArrow may still reach the store: it trusts other certificates."""
_TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})


class BatchUnsupported(Exception):  # noqa: N818 - named like the other outcomes
    """The store did not get or has refused the request, so no object was deleted. Delete single files."""


class BatchUnknown(Exception):  # noqa: N818 - named like the other outcomes
    """The store has not answered for all objects of a request. Some or all of them may be deleted."""


@dataclass(frozen=True)
class BatchReply:
    """The answer of the store: the deleted keys, and the error code of each key that was not deleted.

    S3 counts a key that did not exist as deleted.
    """

    deleted: frozenset[str]
    errors: Mapping[str, str]


@dataclass(frozen=True)
class S3Keys:
    """The keys with which requests are signed. `token` is empty except for temporary keys."""

    access: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)


class S3BatchDeletion:
    """Deletes objects of one bucket. Safe for several threads.

    Args:
        endpoint: The address of the store, with its scheme.
        region: The region for signatures.
        bucket: The name of the bucket.
        keys: The keys for signatures.
        now: The present time, for signatures.
    """

    def __init__(
        self,
        endpoint: str,
        region: str,
        bucket: str,
        keys: S3Keys,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._url = f"{endpoint.rstrip('/')}/{quote(bucket)}?delete="
        self._region = region
        self._keys = keys
        self._now = now
        self._pool = urllib3.PoolManager(maxsize=8, retries=False, timeout=_TIMEOUT)

    @classmethod
    def from_properties(
        cls,
        scheme: str,
        bucket: str,
        properties: Mapping[str, str],
        environment: Mapping[str, str] = os.environ,
    ) -> S3BatchDeletion | None:
        """Create the object for a bucket from PyIceberg's FileIO properties.

        The keys are those of the properties, or else of the variables `AWS_ACCESS_KEY_ID`,
        `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`, which PyArrow reads first as well. None if there are
        no such keys (a role of the machine, for instance), or if the store is not S3.
        """
        if scheme not in _SCHEMES or any(properties.get(name) for name in _OTHER_ACCESS):
            return None
        access, secret = properties.get("s3.access-key-id"), properties.get("s3.secret-access-key")
        token = properties.get("s3.session-token")
        if not access:
            access, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
            token = environment.get("AWS_SESSION_TOKEN")
        if not access or not secret:
            return None
        region = properties.get("s3.region") or "us-east-1"
        endpoint = properties.get("s3.endpoint") or f"https://s3.{region}.amazonaws.com"
        if "://" not in endpoint:
            endpoint = f"https://{endpoint}"
        return cls(endpoint, region, bucket, S3Keys(access, secret, token or ""))

    def delete(self, keys: Sequence[str]) -> BatchReply:
        """Delete at most `MAX_KEYS` objects by one request, without retries.

        Every key must pass `can_name`. Raises BatchUnsupported and BatchUnknown.
        """
        body = build_body(keys)
        headers = sign_request(self._url, body, self._region, self._keys, self._now())
        try:
            response = self._pool.request("POST", self._url, body=body, headers=headers, redirect=False)
        except _UNSENT as error:
            raise BatchUnsupported(type(error).__name__) from error
        except urllib3.exceptions.HTTPError as error:
            raise BatchUnknown(type(error).__name__) from error
        if response.status in _TRANSIENT_STATUS:
            raise BatchUnknown(f"HTTP {response.status}")
        if response.status != 200:
            raise BatchUnsupported(f"HTTP {response.status}")
        return parse_reply(response.data)


def can_name(key: str) -> bool:
    """Return whether a request can name this key: XML 1.0 has no control characters."""
    return all(" " <= character < "\ufffe" or character > "\uffff" for character in key)


def build_body(keys: Sequence[str]) -> bytes:
    """Return the body of a request that deletes these keys."""
    objects = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in keys)
    return f'<Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{objects}</Delete>'.encode()


def parse_reply(content: bytes) -> BatchReply:
    """Return the outcome of each key from the body of a reply.

    Raises BatchUnknown if the reply is not a complete result. A reply with status 200 may be an error.
    """
    try:
        root = ElementTree.fromstring(content)  # noqa: S314 - the lake's own store wrote it
    except ElementTree.ParseError as error:
        raise BatchUnknown(type(error).__name__) from error
    if root.tag.rpartition("}")[2] != "DeleteResult":
        raise BatchUnknown(root.findtext("{*}Code") or "InternalError")
    deleted = {key for one in root.iterfind("{*}Deleted") if (key := one.findtext("{*}Key"))}
    errors = {
        key: one.findtext("{*}Code") or "InternalError"
        for one in root.iterfind("{*}Error")
        if (key := one.findtext("{*}Key"))
    }
    return BatchReply(frozenset(deleted - errors.keys()), errors)


def sign_request(url: str, body: bytes, region: str, keys: S3Keys, now: datetime) -> dict[str, str]:
    """Return the headers of a signed POST request (AWS Signature Version 4). `now` is in UTC."""
    parts = urlsplit(url)
    moment = now.strftime("%Y%m%dT%H%M%SZ")
    checksum = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
    headers = {
        "content-md5": checksum,
        "host": parts.netloc,
        "x-amz-content-sha256": hashlib.sha256(body).hexdigest(),
        "x-amz-date": moment,
    }
    if keys.token:
        headers["x-amz-security-token"] = keys.token
    names = ";".join(sorted(headers))
    lines = [f"{name}:{headers[name]}\n" for name in sorted(headers)]
    request = "\n".join(
        ["POST", parts.path, parts.query, "".join(lines), names, headers["x-amz-content-sha256"]]
    )
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{keys.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return headers
