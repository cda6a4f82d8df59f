"""The names under which the publisher tells Dagster's assets and runs what became of a run.

They stand in the event logs of every user, so they do not change.
"""

from __future__ import annotations

BRANCH = "branchlake/branch"
PUBLICATION = "branchlake/publication"
"""The commit on `main`. An observation that has it is of a publication; automation follows those."""
COMMIT_PAGE = "branchlake/commit"
"""The same commit in Nessie's web page, where that can be opened."""
ON_MAIN = "branchlake/on_main"
"""Whether `main` has what the run materialized. The newest observation of a partition is the current one."""
VERDICT = "branchlake/verdict"
CHECKS = "branchlake/checks"
RUN = "branchlake/run"
TABLES = "branchlake/tables"
REBASED = "branchlake/rebased"
REASONS = "branchlake/reasons"

PUBLISHER_S = "branchlake/publisher_s"
"""Seconds from evidence to publication."""
DELAY_S = "branchlake/publication_delay_s"
"""Seconds from the materialisation to its publication."""
FAILING_ROWS = "branchlake/failing_rows"
"""Rows that failed checks of the asset in this run, summed over its checks."""

ROWS = "dagster/row_count"
"""Rows of the whole table on `main`."""
PARTITION_ROWS = "dagster/partition_row_count"
"""Rows of the partition on `main`."""
