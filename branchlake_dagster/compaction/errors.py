"""The errors of compactions. A compaction that fails has published nothing of its table."""

from __future__ import annotations

from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown, Terminal, Transient


class CompactionRowsDiffer(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The rewritten files do not contain the same rows as the old files. Nothing was published.

    `partitions` are the partitions whose rows differ.
    """


class CompactionNotClean(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The branch of a compaction contains changes other than rewritten files. Nothing was published."""


class RewriteFailed(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Spark failed to rewrite the files. Nothing was published."""


class CompactionContended(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Other writers changed the table during each of five attempts to publish. Nothing was published."""


class CompactionUnknown(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """The reply to a compaction's commit was lost, and `main` does not show yet whether it was made."""
