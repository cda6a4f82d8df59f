"""The public fixtures, as a project has them; what needs Spark takes the session's server."""

from __future__ import annotations

from branchlake_dagster.testing.fixtures import branchlake_server, lake, lake_settings

__all__ = ["branchlake_server", "lake", "lake_settings"]
