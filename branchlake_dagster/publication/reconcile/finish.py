"""The end of a judged run: what became of it is told where people look, then its branch and its pin go."""

from __future__ import annotations

import math
from collections.abc import Callable

from dagster import DagsterInstance

from branchlake_dagster.branching.fencing.end import drop, end
from branchlake_dagster.lakehouse.nessie.client import NessieClient
from branchlake_dagster.publication.commit.publisher import Publisher
from branchlake_dagster.publication.ledger.candidate import Published, Refused
from branchlake_dagster.publication.ledger.main_log import BaseNotOnMain
from branchlake_dagster.publication.reconcile import report
from branchlake_dagster.publication.reconcile.assess import Judged
from branchlake_dagster.publication.reconcile.outcome import Action, Outcome


class Finisher:
    """Tells and cleans up. Every step can be repeated; telling many partitions goes on where it stopped.

    `keep_hours`: how long the branch of a run that was not published stays for debugging. `clock` counts
    seconds.
    """

    def __init__(
        self,
        client: NessieClient,
        publisher: Publisher,
        instance: DagsterInstance,
        *,
        keep_hours: float,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._publisher = publisher
        self._instance = instance
        self._keep_hours = keep_hours
        self._clock = clock

    def finish(self, one: Judged, result: Published | Refused | None, *, until: float) -> Outcome:
        """The outcome of a judged run. None as `result`: it is no candidate. `until` is the clock's end."""
        refused = result if isinstance(result, Refused) else None
        if (refused or (result is None and one.begun)) and not self._keep_hours:
            # Another publisher, perhaps inside the run, may still be at it: only of a branch that is gone it
            # is certain that it was not published.
            drop(self._client, one.branch, keep_data=False)
        done = result if isinstance(result, Published) else self._published(one)
        if done is not None and done.by_hand and (refused or one.why or one.verdict.blocked):
            # Its rows are there, and this must not read as though they were not.
            why = refused.reason() if refused else one.why or one.verdict.summary()
            merged = f"{why.rstrip('.')}. But somebody merged its branch into main by hand, as {done.hash}"
            return self._unpublished(one, merged, Action.REFUSED if refused else one.action)
        if done is not None:
            return self._told(one, done, until)
        if refused:
            return self._unpublished(one, refused.reason(), Action.REFUSED)
        return self._unpublished(one, one.why, one.action)

    def _published(self, one: Judged) -> Published | None:
        """What `main` has of a run that this pass did not publish."""
        if one.candidate is None and not one.begun and not one.evidence.write_set:
            return None
        try:
            return self._publisher.known(one.branch.name, one.base_hash, one.branch.hash)
        except BaseNotOnMain:
            return None

    def _told(self, one: Judged, done: Published, until: float) -> Outcome:
        tables = one.candidate.tables if one.candidate else ()
        again = f", rebased {', '.join(done.rebased)}" if done.rebased else ""
        by_hand = ", merged by hand" if done.by_hand else ""
        detail = f"{', '.join(tables)} as {done.hash[:12]}{by_hand}, {one.verdict.summary()}{again}"
        left = self._announce(one, until, publication=done)
        if left:
            detail += f"; {left} partitions are told by the next ticks"
        else:
            end(self._client, one.branch, keep_data=True)
        return self._outcome(one, Action.PUBLISHED, detail, done.hash, tables)

    def _unpublished(self, one: Judged, why: str | None, action: Action) -> Outcome:
        # A few examples are told, and always all of them: the branch goes now, and nobody comes again.
        self._announce(one, math.inf, why=why)
        if not self._keep_hours:
            end(self._client, one.branch, keep_data=False)
        return self._outcome(one, action, why or one.verdict.summary(), None, ())

    def _announce(
        self, one: Judged, until: float, *, publication: Published | None = None, why: str | None = None
    ) -> int:
        return report.announce(
            self._instance,
            one.run,
            one.evidence,
            one.verdict,
            branch=one.branch.name,
            publication=publication.hash if publication else None,
            by_hand=publication.by_hand if publication else False,
            rebased=publication.rebased if publication else (),
            why=why,
            kept_hours=0.0 if publication else self._keep_hours,
            took_s=self._clock() - one.began,
            more=lambda: self._clock() < until,
        )

    @staticmethod
    def _outcome(
        one: Judged, action: Action, detail: str, publication: str | None, tables: tuple[str, ...]
    ) -> Outcome:
        return Outcome(one.branch.name, one.run.run_id, action, detail, one.verdict, publication, tables)
