"""Whether the holder of a lease may be taken for gone. No clock but the asker's own is believed.

A heartbeat's time is the holder's clock. So the asker watches that nothing of it changes, for as long as the
holder may be silent, by its own monotonic clock and by a number of looks: a pause of the asker's own is no
silence of the holder. A holder that is wrongly taken for gone loses its work and nothing else, because its
fencing token is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dagster import DagsterInstance

from branchlake_dagster.branching.branch.run_branch import run_id_of
from branchlake_dagster.branching.branch.run_tags import judged
from branchlake_dagster.branching.liveness.failure_detector import LOOKS
from branchlake_dagster.branching.liveness.heartbeat_store import MISSED, Heartbeat
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound


class HolderWatch:
    """Looks at one holder again and again.

    `beats` are the last heartbeats of all writers, `interval_s` the asker's own interval, for a holder that
    has none.
    """

    def __init__(
        self,
        holder: str,
        client: NessieClient,
        instance: DagsterInstance,
        beats: Callable[[], Sequence[Heartbeat]],
        *,
        interval_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holder = holder
        self._client = client
        self._instance = instance
        self._beats = beats
        self._interval_s = interval_s
        self._monotonic = monotonic
        self._seen: frozenset[str] | None = None
        self._since = 0.0
        self._looks = 0

    def gone(self) -> str | None:
        """Why the holder is gone, in words; None while it may still publish."""
        run = self._instance.get_run_by_id(run_id_of(self._holder))
        if run is not None and run.is_finished:
            if not run.is_success:
                return f"its run has ended as {run.status.value.lower()}"
            if judged(run.tags, self._holder) or self._branch_is_gone():
                return "its run has ended"
            return None  # it has passed and waits for its publication, which only a publisher may end
        return self._silent()

    def _silent(self) -> str | None:
        mine = [beat for beat in self._beats() if beat.branch == self._holder]
        seen = frozenset(beat.text for beat in mine)
        now = self._monotonic()
        if seen != self._seen:
            self._seen, self._since, self._looks = seen, now, 0
            return None
        self._looks += 1
        longest = max((beat.silent_s for beat in mine), default=MISSED * self._interval_s)
        if self._looks < LOOKS or now - self._since < longest:
            return None
        return f"it was silent for {now - self._since:.0f} s"

    def _branch_is_gone(self) -> bool:
        try:
            self._client.reference(self._holder)
        except ReferenceNotFound:
            return True
        return False
