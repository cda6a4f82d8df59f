"""The names of our references: a prefix and the run's UUID, so that nothing of a person's is taken for ours.

`publish-q3-report` was once deleted as a publication branch, and `run-experiment` would have been reaped.
Behind the prefix of a live ingestion's batch are three UUIDs (`batch_branch`).
"""

from __future__ import annotations

import re

from branchlake_dagster.settings import RUN_BRANCH_PREFIX

PUBLICATION_PREFIX = "publish-"
"""Branches on which the publisher prepares what had to be rebased."""
DISCARDED_PREFIX = "discarded-"
SWEEPING_PREFIX = "sweeping-"
CLAIM_PREFIX = "judged-"

UUID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
"""As a regular expression of Python, and of Nessie's filters."""
_ALL = (RUN_BRANCH_PREFIX, PUBLICATION_PREFIX, DISCARDED_PREFIX, SWEEPING_PREFIX, CLAIM_PREFIX)


def _pattern(*prefixes: str) -> str:
    return f"^({'|'.join(prefixes)}){UUID}([.]{UUID}[.]{UUID})?$"


def branches(*prefixes: str) -> str:
    """Nessie's filter for our branches with these prefixes."""
    return f"refType == 'BRANCH' && ref.name.matches('{_pattern(*prefixes)}')"


def tags(*prefixes: str) -> str:
    """Nessie's filter for our tags with these prefixes."""
    return f"refType == 'TAG' && ref.name.matches('{_pattern(*prefixes)}')"


def is_ours(name: str, *prefixes: str) -> bool:
    """Whether a reference has a name of ours: with one of these prefixes, or with any."""
    return re.fullmatch(_pattern(*(prefixes or _ALL)), name) is not None


def run_of(name: str) -> str:
    """The run that a reference of ours is about, or what names a batch."""
    for prefix in _ALL:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name
