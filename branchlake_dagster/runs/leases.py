"""Exclusive leases on names: tokens on `main`, how a run holds them, and when a holder is gone.

A lease as it lies on `main`: who holds a name, and with which fencing token.

It is a namespace without tables, `branchlake.lease-{name}`, whose properties tell both. A grant is a commit
on `main`, of which Nessie lets one of several through, and a publication can ask in its own commit that the
grant still stands.

Whether the holder of a lease may be taken for gone. No clock but the asker's own is believed.

A heartbeat's time is the holder's clock. So the asker watches that nothing of it changes, for as long as the
holder may be silent, by its own monotonic clock and by a number of looks: a pause of the asker's own is no
silence of the holder. A holder that is wrongly taken for gone loses its work and nothing else, because its
fencing token is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dagster import DagsterInstance

from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict, NessieOutcomeUnknown, ReferenceNotFound
from branchlake_dagster.nessie.model import Content, ContentKey, Namespace, Put
from branchlake_dagster.runs.failure_detector import LOOKS
from branchlake_dagster.runs.heartbeats import MISSED, Heartbeat
from branchlake_dagster.runs.run_branch import branch_name, run_id_of
from branchlake_dagster.runs.run_tags import Place, judged
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.errors import LeaseHeld, LeaseLost

HOME = "branchlake"
"""The namespace that holds them. Branches made from an empty `main` have it anyway."""


def lease_key(name: str) -> ContentKey:
    """Where on `main` the lease of a name is."""
    return ContentKey([HOME, f"lease-{name}"])


@dataclass(frozen=True)
class Lease:
    """What `main` says of a name. `token` grows with each grant; `holder` is the branch of a run."""

    name: str
    token: int = 0
    holder: str | None = None

    @classmethod
    def of(cls, name: str, contents: Mapping[ContentKey, Content]) -> Lease:
        """The lease among contents; one that was never granted has token 0 and no holder."""
        found = contents.get(lease_key(name))
        if not isinstance(found, Namespace):
            return cls(name)
        told = found.properties.get(LakeProperty.FENCING_TOKEN, "")
        # A hand that broke the number must not make the next one smaller than one that was granted:
        # the holder is compared as well, so a token that begins anew fences nobody in.
        return cls(name, int(told) if told.isdigit() else 0, found.properties.get(LakeProperty.HOLDER))

    def granted_to(self, branch: str) -> Lease:
        """The next grant."""
        return Lease(self.name, self.token + 1, branch)

    def puts(self, contents: Mapping[ContentKey, Content]) -> list[Put]:
        """The operations that bring it to `main`, which holds `contents`."""
        key, home = lease_key(self.name), ContentKey([HOME])
        before = contents.get(key)
        told = {
            "comment": f"who may publish what is exclusive as {self.name!r}; no tables",
            LakeProperty.HOLDER: self.holder or "",
            LakeProperty.FENCING_TOKEN: str(self.token),
        }
        found = [Put(key, Namespace(before.content_id if before else None, key.elements, told))]
        return found if home in contents else [Put(home, Namespace(None, home.elements)), *found]


def lease_keys(names: Iterable[str]) -> list[ContentKey]:
    """What is to be read of `main` to tell these leases and to grant them."""
    return [ContentKey([HOME]), *(lease_key(name) for name in names)]


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
                    properties={
                        LakeProperty.HOLDER: own,
                        LakeProperty.FENCING_TOKEN: str(grant.token),
                        LakeProperty.LEASE: name,
                    },
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
