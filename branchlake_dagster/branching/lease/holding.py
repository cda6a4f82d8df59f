"""Holding leases while a run works: granted before its branch is made, asked for again at each access."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from dagster import DagsterInstance

from branchlake_dagster.branching.branch.run_branch import branch_name
from branchlake_dagster.branching.branch.run_tags import Place
from branchlake_dagster.branching.errors import LeaseHeld, LeaseLost
from branchlake_dagster.branching.lease.holder import HolderWatch
from branchlake_dagster.branching.lease.token import HOLDER, TOKEN, Lease, lease_keys
from branchlake_dagster.branching.liveness.failure_detector import LOOKS
from branchlake_dagster.branching.liveness.heartbeat_store import MISSED, Heartbeat
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict, NessieOutcomeUnknown


class RunLeases:
    """The leases of run `run_id`.

    `names` tells which it needs, empty where nobody can say yet. `beats` are the last heartbeats of all
    writers, `interval_s` the seconds between those of this run; `wait_s`: how long it waits for another
    holder. `say` tells of a grant in the run's log.
    """

    def __init__(
        self,
        client: Callable[[], NessieClient],
        instance: DagsterInstance,
        run_id: str,
        names: Callable[[], Collection[str]],
        beats: Callable[[], Sequence[Heartbeat]],
        *,
        interval_s: float,
        wait_s: float,
        say: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = client
        self._instance = instance
        self._run_id = run_id
        self._names = names
        self._beats = beats
        self._interval_s = interval_s
        self._wait_s = wait_s
        self._say = say
        self._monotonic = monotonic
        self._sleep = sleep

    def hold(self, place: Place | None) -> None:
        """Make sure that this run holds what it needs. `place` is its branch; None: there is none yet.

        Raises LeaseHeld when another holder goes on for longer than this run waits, LeaseLost when another
        one has held it since the run's base: then what the run has read may be old.
        """
        names = sorted(self._names())
        if not names:
            return
        own = branch_name(self._run_id)
        contents = self._client().contents_at(MAIN, lease_keys(names)).contents
        for name in names:  # always in one order: two runs that need the same two cannot wait for each other
            if Lease.of(name, contents).holder != own:
                self._granted(name, own, place)

    def _granted(self, name: str, own: str, place: Place | None) -> None:
        began = self._monotonic()
        watches: dict[tuple[int, str], HolderWatch] = {}
        while True:
            seen = self._client().contents_at(MAIN, lease_keys([name]))
            now = Lease.of(name, seen.contents)
            if now.holder == own:
                self._say(f"Holds {name!r} alone, with fencing token {now.token}.")
                return
            inherited = place is not None and now.holder is not None and now.holder == place.continues
            if place is not None and not inherited:
                self._not_since_base(now, own, place)
            gone = None
            if now.holder is not None and not inherited:
                watch = watches.setdefault((now.token, now.holder), self._watch(now.holder))
                gone = watch.gone()
                if gone is None:
                    self._wait(now, self._monotonic() - began)
                    continue
            grant = now.granted_to(own)
            after = f" after {now.holder}: {gone}" if gone else ""
            try:
                self._client().commit(
                    MAIN,
                    expected_hash=seen.reference.hash,
                    operations=grant.puts(seen.contents),
                    message=f"Grant {name!r} to {own}, fencing token {grant.token}{after}",
                    properties={HOLDER: own, TOKEN: str(grant.token), "branchlake.lease": name},
                )
            except (NessieConflict, NessieOutcomeUnknown):
                continue  # another one was faster, or nobody knows: the next look tells

    def _watch(self, holder: str) -> HolderWatch:
        return HolderWatch(
            holder,
            self._client(),
            self._instance,
            self._beats,
            interval_s=self._interval_s,
            monotonic=self._monotonic,
        )

    def _not_since_base(self, now: Lease, own: str, place: Place) -> None:
        """Raise LeaseLost unless the lease is as it was at the run's base."""
        base = Lease(now.name)
        if place.base_hash:
            base = Lease.of(now.name, self._client().contents(f"@{place.base_hash}", lease_keys([now.name])))
        if base == now:
            return
        raise LeaseLost(
            f"{now.holder} has taken over {now.name!r} with fencing token {now.token}"
            f"{', since this run was silent for too long' if base.holder == own else ''};"
            " nothing of this run can be published.",
            branch=place.branch,
            run_id=self._run_id,
            hint="Launch the run anew: it then starts from what the other one has published.",
            reason="silent_too_long" if base.holder == own else "taken_over",
            subject=now.name,
        )

    def _wait(self, now: Lease, waited_s: float) -> None:
        if waited_s >= self._wait_s:
            raise LeaseHeld(
                f"{now.holder} holds {now.name!r} (fencing token {now.token}) and is at work or waits for its"
                f" publication; this run has waited for {waited_s:.0f} s.",
                branch=now.holder,
                run_id=self._run_id,
                hint="Nothing was changed. Launch it again when that run has ended, or raise"
                " BRANCHLAKE_EXCLUSIVE_WAIT_S.",
                subject=now.name,
            )
        # So often that a silent holder is looked at often enough within the time that it may be silent.
        self._sleep(min(1.0, MISSED * self._interval_s / (2 * LOOKS)))
