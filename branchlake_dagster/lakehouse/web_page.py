"""The web page that Nessie serves: branches, commits and contents."""

from __future__ import annotations

from branchlake_dagster.embedded.rest_catalog import serves_rest
from branchlake_dagster.embedded.servers import Endpoints
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.settings import Settings


def nessie_page_url(endpoints: Endpoints, settings: Settings) -> str:
    """Its address. A guarded embedded server gives it to nobody: the page has no way to send a token."""
    if settings.embedded_nessie and endpoints.nessie_token is not None:
        return "off, as Nessie asks for a token: set BRANCHLAKE_GUARD_NESSIE=false, then down and up"
    return f"{_server_url(endpoints)}/"


def commit_page_url(endpoints: Endpoints, settings: Settings, commit: str) -> str | None:
    """The address of a commit on `main` in that page; None where the page is given to nobody."""
    if settings.embedded_nessie and endpoints.nessie_token is not None:
        return None
    return f"{_server_url(endpoints)}/commits/{MAIN}/{commit}"


def rest_catalog_url(endpoints: Endpoints, settings: Settings) -> str | None:
    """Where engines attach to the embedded server as an Iceberg REST catalogue; None for a remote one."""
    if not settings.embedded_nessie:
        return None
    if not serves_rest(settings):
        return "none: Nessie serves s3:// warehouses only"
    return f"{_server_url(endpoints)}/iceberg"


def _server_url(endpoints: Endpoints) -> str:
    return endpoints.nessie_uri.rstrip("/").rpartition("/api/")[0]
