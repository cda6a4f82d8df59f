"""What can go wrong between us and Spark's server."""

from __future__ import annotations

from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown


class SparkGone(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """Spark's server does not answer any more. What it was asked for last it may have done."""
