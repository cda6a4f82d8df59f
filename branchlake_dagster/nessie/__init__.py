"""A typed client for Nessie's REST API v2."""

from branchlake_dagster.nessie.client import MergeMode, NessieClient
from branchlake_dagster.nessie.errors import RetryPolicy

__all__ = ["MergeMode", "NessieClient", "RetryPolicy"]
