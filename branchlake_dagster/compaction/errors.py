"""The errors of compactions. A compaction that fails has published nothing of its table."""

from __future__ import annotations

from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown, Terminal, Transient


class CompactionRowsDiffer(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The compacted files do not hold the same rows as the old ones; nothing was published.

    `partitions` are those whose rows differ.
    """


class CompactionNotClean(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """The branch of a compaction contains changes other than rewritten files. Nothing was published."""


class RewriteFailed(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Spark did not rewrite the files; nothing was published."""


class CompactionContended(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Other writers kept changing the table; nothing was published."""


class CompactionUnknown(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """The reply to a compaction's commit was lost, and `main` does not show yet whether it was made."""
