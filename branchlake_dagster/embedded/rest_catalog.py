"""Configure the embedded Nessie as an Iceberg REST catalog for Trino, DuckDB and other engines.

As a REST catalog, Nessie reads and writes table metadata itself. So it must reach the warehouse, which works
in S3 but not in local folders. Its settings: https://projectnessie.org/nessie-0-99-0/configuration/
"""

from __future__ import annotations

from collections.abc import Mapping

from branchlake_dagster.settings import Settings

WAREHOUSE = "lake"
"""The name of the warehouse for clients."""
_SECRET = "lakestore"  # noqa: S105 - the name of a secret, not the secret
"""One lower-case word: Quarkus maps LAKESTORE_NAME to `lakestore.name` and to no other spelling."""


def serves_rest(settings: Settings) -> bool:
    """Return whether the embedded Nessie can be an Iceberg REST catalog of this warehouse."""
    return settings.embedded_nessie and settings.warehouse_uri.startswith("s3:")


def catalog_flags(settings: Settings) -> Mapping[str, str]:
    """Return Nessie's properties for the REST catalog, without secrets; {} if it cannot be served."""
    if not serves_rest(settings):
        return {}
    store = "nessie.catalog.service.s3.default-options"
    flags = {
        "nessie.catalog.default-warehouse": WAREHOUSE,
        f"nessie.catalog.warehouses.{WAREHOUSE}.location": settings.warehouse_uri,
        f"{store}.region": settings.s3_region,
    }
    if settings.s3_endpoint:
        flags |= {f"{store}.endpoint": settings.s3_endpoint, f"{store}.path-style-access": "true"}
    if _s3_keys(settings):
        flags[f"{store}.access-key"] = f"urn:nessie-secret:quarkus:{_SECRET}"
    else:
        flags[f"{store}.auth-type"] = "APPLICATION_GLOBAL"
    return flags


def catalog_environment(settings: Settings) -> Mapping[str, str]:
    """Return the S3 keys as environment variables for Quarkus, because a command line would expose them.

    Returns {} if the REST catalog cannot be served, or if the settings have no keys.
    """
    if not serves_rest(settings):
        return {}
    prefix = _SECRET.upper()
    name, secret = _s3_keys(settings) or ("", "")
    return {f"{prefix}_NAME": name, f"{prefix}_SECRET": secret} if name else {}


def _s3_keys(settings: Settings) -> tuple[str, str] | None:
    if not (settings.s3_access_key_id and settings.s3_secret_access_key):
        return None
    return settings.s3_access_key_id.get_secret_value(), settings.s3_secret_access_key.get_secret_value()
