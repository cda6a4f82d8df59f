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
from branchlake_dagster.runs.failure_detector import MIN_READINGS
from branchlake_dagster.runs.heartbeats import MISSED_INTERVALS, Heartbeat
from branchlake_dagster.runs.run_branch import run_branch_name, run_id_of_branch
from branchlake_dagster.runs.run_tags import RunLocation, is_judged
from branchlake_dagster.stored_names import LakeProperty
from branchlake_dagster.tables.errors import LeaseHeld, LeaseLost

LEASE_NAMESPACE = "branchlake"
"""The namespace that holds them. Branches made from an empty `main` have it anyway."""


def lease_key(name: str) -> ContentKey:
    """Where on `main` the lease of a name is."""
    return ContentKey([LEASE_NAMESPACE, f"lease-{name}"])


@dataclass(frozen=True)
class Lease:
    """What `main` says of a name. `token` grows with each grant; `holder` is the branch of a run."""

    name: str
    token: int = 0
    holder: str | None = None

    @classmethod
    def from_contents(cls, name: str, contents: Mapping[ContentKey, Content]) -> Lease:
        """The lease among contents; one that was never granted has token 0 and no holder."""
        namespace = contents.get(lease_key(name))
        if not isinstance(namespace, Namespace):
            return cls(name)
        recorded_token = namespace.properties.get(LakeProperty.FENCING_TOKEN, "")
        # A hand that broke the number must not make the next one smaller than one that was granted:
        # the holder is compared as well, so a token that begins anew fences nobody in.
        return cls(
            name,
            int(recorded_token) if recorded_token.isdigit() else 0,
            namespace.properties.get(LakeProperty.HOLDER),
        )

    def next_grant(self, holder: str) -> Lease:
        """The next grant."""
        return Lease(self.name, self.token + 1, holder)

    def put_operations(self, contents: Mapping[ContentKey, Content]) -> list[Put]:
        """The operations that bring it to `main`, which holds `contents`."""
        key, parent_key = lease_key(self.name), ContentKey([LEASE_NAMESPACE])
        existing = contents.get(key)
        properties = {
            "comment": f"who may publish what is exclusive as {self.name!r}; no tables",
            LakeProperty.HOLDER: self.holder or "",
            LakeProperty.FENCING_TOKEN: str(self.token),
        }
        operations = [
            Put(key, Namespace(existing.content_id if existing else None, key.elements, properties))
        ]
        return (
            operations
            if parent_key in contents
            else [Put(parent_key, Namespace(None, parent_key.elements)), *operations]
        )


def lease_keys(names: Iterable[str]) -> list[ContentKey]:
    """What is to be read of `main` to tell these leases and to grant them."""
    return [ContentKey([LEASE_NAMESPACE]), *(lease_key(name) for name in names)]


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
        load_heartbeats: Callable[[], Sequence[Heartbeat]],
        *,
        interval_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holder = holder
        self._client = client
        self._instance = instance
        self._load_heartbeats = load_heartbeats
        self._interval_s = interval_s
        self._monotonic = monotonic
        self._contents: frozenset[str] | None = None
        self._since = 0.0
        self._readings = 0

    def gone_reason(self) -> str | None:
        """Why the holder is gone, in words; None while it may still publish."""
        run = self._instance.get_run_by_id(run_id_of_branch(self._holder))
        if run is not None and run.is_finished:
            if not run.is_success:
                return f"its run has ended as {run.status.value.lower()}"
            if is_judged(run.tags, self._holder) or self._is_branch_gone():
                return "its run has ended"
            return None  # it has passed and waits for its publication, which only a publisher may end
        return self._silence_reason()

    def _silence_reason(self) -> str | None:
        holder_beats = [beat for beat in self._load_heartbeats() if beat.branch == self._holder]
        contents = frozenset(beat.text for beat in holder_beats)
        now = self._monotonic()
        if contents != self._contents:
            self._contents, self._since, self._readings = contents, now, 0
            return None
        self._readings += 1
        max_silence_s = max(
            (beat.max_silence_s for beat in holder_beats), default=MISSED_INTERVALS * self._interval_s
        )
        if self._readings < MIN_READINGS or now - self._since < max_silence_s:
            return None
        return f"it was silent for {now - self._since:.0f} s"

    def _is_branch_gone(self) -> bool:
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
        exclusive_names: Callable[[], Collection[str]],
        load_heartbeats: Callable[[], Sequence[Heartbeat]],
        *,
        interval_s: float,
        wait_s: float,
        log_info: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = client
        self._instance = instance
        self._run_id = run_id
        self._exclusive_names = exclusive_names
        self._load_heartbeats = load_heartbeats
        self._interval_s = interval_s
        self._wait_s = wait_s
        self._log_info = log_info
        self._monotonic = monotonic
        self._sleep = sleep

    def ensure_held(self, location: RunLocation | None) -> None:
        """Make sure that this run holds what it needs. `location` is its branch; None: there is none yet.

        Raises LeaseHeld when another holder goes on for longer than this run waits, LeaseLost when another
        one has held it since the run's base: then what the run has read may be old.
        """
        names = sorted(self._exclusive_names())
        if not names:
            return
        own_branch = run_branch_name(self._run_id)
        contents = self._client().contents_at(MAIN, lease_keys(names)).contents
        for name in names:  # always in one order: two runs that need the same two cannot wait for each other
            if Lease.from_contents(name, contents).holder != own_branch:
                self._acquire(name, own_branch, location)

    def _acquire(self, name: str, own_branch: str, location: RunLocation | None) -> None:
        started_at = self._monotonic()
        watches: dict[tuple[int, str], HolderWatch] = {}
        while True:
            main_contents = self._client().contents_at(MAIN, lease_keys([name]))
            lease = Lease.from_contents(name, main_contents.contents)
            if lease.holder == own_branch:
                self._log_info(f"Holds {name!r} alone, with fencing token {lease.token}.")
                return
            is_inherited = (
                location is not None and lease.holder is not None and lease.holder == location.continues
            )
            if location is not None and not is_inherited:
                self._require_base_lease(lease, own_branch, location)
            gone_reason = None
            if lease.holder is not None and not is_inherited:
                watch = watches.setdefault((lease.token, lease.holder), self._watch(lease.holder))
                gone_reason = watch.gone_reason()
                if gone_reason is None:
                    self._wait(lease, self._monotonic() - started_at)
                    continue
            grant = lease.next_grant(own_branch)
            takeover_note = f" after {lease.holder}: {gone_reason}" if gone_reason else ""
            try:
                self._client().commit(
                    MAIN,
                    expected_hash=main_contents.reference.hash,
                    operations=grant.put_operations(main_contents.contents),
                    message=f"Grant {name!r} to {own_branch}, fencing token {grant.token}{takeover_note}",
                    properties={
                        LakeProperty.HOLDER: own_branch,
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
            self._load_heartbeats,
            interval_s=self._interval_s,
            monotonic=self._monotonic,
        )

    def _require_base_lease(self, lease: Lease, own_branch: str, location: RunLocation) -> None:
        """Raise LeaseLost unless the lease is as it was at the run's base."""
        base_lease = Lease(lease.name)
        if location.base_hash:
            base_lease = Lease.from_contents(
                lease.name, self._client().contents(f"@{location.base_hash}", lease_keys([lease.name]))
            )
        if base_lease == lease:
            return
        raise LeaseLost(
            f"{lease.holder} has taken over {lease.name!r} with fencing token {lease.token}"
            f"{', since this run was silent for too long' if base_lease.holder == own_branch else ''};"
            " nothing of this run can be published.",
            branch=location.branch,
            run_id=self._run_id,
            hint="Launch the run anew: it then starts from what the other one has published.",
            reason="silent_too_long" if base_lease.holder == own_branch else "taken_over",
            subject=lease.name,
        )

    def _wait(self, lease: Lease, waited_s: float) -> None:
        if waited_s >= self._wait_s:
            raise LeaseHeld(
                f"{lease.holder} holds {lease.name!r} (fencing token {lease.token}) and is at work or waits"
                " for its"
                f" publication; this run has waited for {waited_s:.0f} s.",
                branch=lease.holder,
                run_id=self._run_id,
                hint="Nothing was changed. Launch it again when that run has ended, or raise"
                " BRANCHLAKE_EXCLUSIVE_WAIT_S.",
                subject=lease.name,
            )
        # So often that a silent holder is looked at often enough within the time that it may be silent.
        self._sleep(min(1.0, MISSED_INTERVALS * self._interval_s / (2 * MIN_READINGS)))
