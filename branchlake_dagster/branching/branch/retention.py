"""How long the branch of a run stays, recorded with the run when its branch is opened.

Commands and other code locations of the same Dagster instance have settings of their own. The run's own
settings are in its tags, so every reaper, sweeper and publisher follows them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from branchlake_dagster.branching.branch.run_tags import RETENTION_TAG, opened_by
from branchlake_dagster.settings import Settings

_SETTINGS = ("keep_failed_hours", "discard_grace_h", "orphan_max_age_h")
"""In the order of the fields of `Retention`; each counts hours."""


@dataclass(frozen=True)
class Retention:
    """The times after which what a run has left is ended.

    `keep_failed` counts from the end of a run that was not published, `discard_grace` from the discarding of
    its branch, `max_age` from the last sign of life of a run without heartbeats.
    """

    keep_failed: timedelta
    discard_grace: timedelta
    max_age: timedelta

    @classmethod
    def of(cls, settings: Settings) -> Retention:
        """The retention that these settings demand."""
        return cls(*(timedelta(hours=getattr(settings, name)) for name in _SETTINGS))

    @classmethod
    def of_run(cls, tags: Mapping[str, str], run_id: str) -> Retention | None:
        """The retention that run `run_id` has recorded.

        None if the run opened no branch, or an older version opened it: the reader's settings hold then.
        """
        if not opened_by(tags, run_id):
            return None
        try:
            recorded = json.loads(tags.get(RETENTION_TAG, ""))
            hours = [float(recorded[name]) for name in _SETTINGS]
            if not all(math.isfinite(each) and each >= 0 for each in hours):
                return None
            return cls(*(timedelta(hours=each) for each in hours))
        except (ValueError, KeyError, TypeError, OverflowError):
            return None

    def tags(self) -> dict[str, str]:
        """The tag that records the retention with a run."""
        spans = (self.keep_failed, self.discard_grace, self.max_age)
        hours = {name: span / timedelta(hours=1) for name, span in zip(_SETTINGS, spans, strict=True)}
        return {RETENTION_TAG: json.dumps(hours)}


def keep_failed_hours(tags: Mapping[str, str], run_id: str, settings: Settings) -> float:
    """The hours for which the branch of a run that is not published is kept; `settings` are the reader's."""
    recorded = Retention.of_run(tags, run_id)
    return settings.keep_failed_hours if recorded is None else recorded.keep_failed / timedelta(hours=1)
