"""Addresses of the web page that Nessie serves, and of its Iceberg REST catalog."""

from __future__ import annotations

from branchlake_dagster.embedded.rest_catalog import serves_rest
from branchlake_dagster.embedded.servers import Endpoints
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.settings import Settings


def nessie_page_url(endpoints: Endpoints, settings: Settings) -> str:
    """Return the page's address, or a sentence if the embedded server requires a token.

    The page cannot send a token, so such a server does not serve it.
    """
    if settings.embedded_nessie and endpoints.nessie_token is not None:
        return "off, as Nessie requires a token: set BRANCHLAKE_GUARD_NESSIE=false, then down and up"
    return f"{_server_url(endpoints)}/"


def commit_page_url(endpoints: Endpoints, settings: Settings, commit: str) -> str | None:
    """Return the page's address for a commit on `main`; None if the embedded server requires a token."""
    if settings.embedded_nessie and endpoints.nessie_token is not None:
        return None
    return f"{_server_url(endpoints)}/commits/{MAIN}/{commit}"


def rest_catalog_url(endpoints: Endpoints, settings: Settings) -> str | None:
    """Return the address of the embedded server's Iceberg REST catalog; None for a remote server.

    If the server cannot serve a REST catalog, a sentence with the reason is returned.
    """
    if not settings.embedded_nessie:
        return None
    if not serves_rest(settings):
        return "none: Nessie serves s3:// warehouses only"
    return f"{_server_url(endpoints)}/iceberg"


def _server_url(endpoints: Endpoints) -> str:
    return endpoints.nessie_uri.rstrip("/").rpartition("/api/")[0]
