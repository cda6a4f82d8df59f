"""What to do about a run that was not published, as a sentence for its log and its assets' pages."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from branchlake_dagster.lakehouse.sql_names import sql_name
from branchlake_dagster.nessie.model import ContentKey

LAUNCH_AGAIN = "Launch it again: the new run starts from what main is now."
"""Of a run that passed its checks and met a change of the same rows on `main`."""


def look_at_rows(tables: Sequence[str], run_id: str) -> str:
    """How to see the rows that failed a check; empty if no table had any.

    `tables` are dotted names. The command finds the run's rows on its branch, and later on the tag of the
    discarded branch.
    """
    commands = [
        f"branchlake sql {shlex.quote(f'FROM {sql_name(ContentKey.from_path(table))}')} --run {run_id[:8]}"
        for table in tables
    ]
    return f"Look at the rows: {', '.join(commands)}." if commands else ""
