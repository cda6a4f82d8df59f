"""The properties of `NessieCatalog`, and the client that they configure."""

from __future__ import annotations

from collections.abc import Mapping

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.nessie import NessieClient

URI = "uri"
REF = "ref"
TOKEN = "token"  # noqa: S105 - the name of a property
VERIFY = "ssl.verify"
AUTHOR = "commit.author"
COMMIT_PROPERTY = "commit.property."
NAMESPACE_CREATE = "namespace.create"

DEFAULT_REF = "main"
DEFAULT_AUTHOR = "branchlake"


def commit_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties named `commit.property.<name>`, by `<name>`. They are added to every commit."""
    return {
        name.removeprefix(COMMIT_PROPERTY): str(value)
        for name, value in properties.items()
        if name.startswith(COMMIT_PROPERTY)
    }


def _parse_verify(value: str) -> bool | str:
    return {"true": True, "false": False}.get(value.lower(), value)


def build_client(properties: Mapping[str, str]) -> NessieClient:
    """Build a client from `uri`, `token` and `ssl.verify` (`true`, `false` or the path of a CA bundle).

    Raises ConfigurationError if `uri` is missing or one of them is not valid.
    """
    uri = properties.get(URI)
    if not uri:
        raise ConfigurationError(
            "The Nessie catalog has no 'uri' property.", hint="Example: http://127.0.0.1:19120/api/v2"
        )
    return NessieClient(
        uri, token=properties.get(TOKEN), verify=_parse_verify(str(properties.get(VERIFY, "true")))
    )
