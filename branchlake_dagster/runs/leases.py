"""Holds exclusive leases on names, and detects when the holder of a lease is gone.

A lease is a namespace without tables on `main`, `branchlake.lease-{name}`. Its properties record the holder
and a fencing token. A grant is a commit on `main`. If several runs commit at once, Nessie accepts one of
them. A publication can require in its own commit that the grant is still valid.

A heartbeat's time is from the holder's clock, which is not trusted. Instead the waiting run watches whether
the heartbeat changes, by its own monotonic clock and a number of readings. So a pause of the waiting run does
not count as silence of the holder. A holder that is wrongly declared gone loses only its work, because its
fencing token is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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

_ABSENCE_S = 5.0
"""The seconds without heartbeat and branch after which a holder is gone. A new holder soon has both."""
LEASE_NAMESPACE = "branchlake"
"""The namespace of the leases. Branchlake's first commit to an empty `main` creates it."""

_LEASE_PREFIX = "lease-"


def lease_key(name: str) -> ContentKey:
    """Return the content key under which lease `name` is stored on `main`: `branchlake.lease-{name}`."""
    return ContentKey([LEASE_NAMESPACE, f"{_LEASE_PREFIX}{name}"])


@dataclass(frozen=True)
class Lease:
    """The lease of a name on `main`.

    `token` is the fencing token, which grows by 1 with each grant. `holder` is the branch of the run that
    holds the lease; None before the first grant.
    """

    name: str
    token: int = 0
    holder: str | None = None

    @classmethod
    def from_contents(cls, name: str, contents: Mapping[ContentKey, Content]) -> Lease:
        """Return the lease from the contents of `main`. A lease without grant has token 0 and no holder."""
        namespace = contents.get(lease_key(name))
        if not isinstance(namespace, Namespace):
            return cls(name)
        recorded_token = namespace.properties.get(LakeProperty.FENCING_TOKEN, "")
        # If somebody damages the token outside branchlake, tokens start again from 0. This is safe, because
        # the holder is compared too.
        return cls(
            name,
            int(recorded_token) if recorded_token.isdigit() else 0,
            namespace.properties.get(LakeProperty.HOLDER),
        )

    def next_grant(self, holder: str) -> Lease:
        """Return the lease after its next grant, to `holder`."""
        return Lease(self.name, self.token + 1, holder)

    def put_operations(self, contents: Mapping[ContentKey, Content]) -> list[Put]:
        """Return the operations that commit the lease to `main`; they also create its namespace if needed.

        `contents` are the contents of `lease_keys([name])` on `main` now.
        """
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
    """Return the content keys to load from `main` before the leases `names` are read or granted.

    These are the key of each lease, after the key of the namespace that contains them.
    """
    return [ContentKey([LEASE_NAMESPACE]), *(lease_key(name) for name in names)]


class HolderWatch:
    """Decides over repeated calls of `gone_reason` whether the holder of a lease, a run branch, is gone.

    `load_heartbeats` loads the last heartbeats of all writers. `interval_s` is the heartbeat interval of the
    waiting run in seconds; it is assumed for a holder without heartbeats.
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
        """Return why the holder is gone, as part of a sentence; None if its run may still be published.

        A holder is gone if its run has failed, or has ended and has a verdict or no branch. It is also gone
        if it was silent: its heartbeats stayed unchanged through six further calls and three of its
        intervals. A run of another Dagster instance that has neither heartbeats nor a branch was published or
        discarded; for it 5 s are enough.
        """
        run = self._instance.get_run_by_id(run_id_of_branch(self._holder))
        if run is not None and run.is_finished:
            if not run.is_success:
                return f"its run has ended as {run.status.value.lower()}"
            if is_judged(run.tags, self._holder) or self._is_branch_gone():
                return "its run has ended"
            return None  # it has passed and waits for publication; only a publisher may end it
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
        if self._readings < MIN_READINGS:
            return None
        if not holder_beats and now - self._since >= _ABSENCE_S and self._is_branch_gone():
            return "it has neither a heartbeat nor a branch"
        if now - self._since < max_silence_s:
            return None
        return f"it was silent for {now - self._since:.0f} s"

    def _is_branch_gone(self) -> bool:
        try:
            self._client.reference(self._holder)
        except ReferenceNotFound:
            return True
        return False


class RunLeases:
    """Acquires the leases of run `run_id`.

    `exclusive_names` returns the names of the leases that the run needs; empty if they are not known yet.
    `load_heartbeats` loads the last heartbeats of all writers. `interval_s` is the interval of this run's
    heartbeats in seconds. The run waits for another holder for at most `wait_s` seconds. `log_info` records a
    grant in the run's log.
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
    ) -> None:
        self._client = client
        self._instance = instance
        self._run_id = run_id
        self._exclusive_names = exclusive_names
        self._load_heartbeats = load_heartbeats
        self._interval_s = interval_s
        self._wait_s = wait_s
        self._log_info = log_info
        self._inherited_names: frozenset[str] | None = None

    def ensure_held(self, location: RunLocation | None) -> None:
        """Ensure that this run holds all leases that it needs.

        A lease that is free, or whose holder is gone, is granted to this run. `location` is the run's branch
        and base; None if it has no branch yet.

        A retry also takes over the leases of the run that it continues, because that run may have written
        exclusive assets that the retry does not select.

        Raises LeaseHeld if another holder stays active for longer than this run waits. Raises LeaseLost if
        another run has held the lease since the run's base, because the run may have read old data.
        """
        if self._inherited_names is None and location is not None and location.continues is not None:
            branches = {location.continues, run_branch_name(self._run_id)}  # another process may be faster
            self._inherited_names = frozenset(self._iter_held(branches))
        names = sorted({*self._exclusive_names(), *(self._inherited_names or ())})
        if not names:
            return
        own_branch = run_branch_name(self._run_id)
        contents = self._client().contents_at(MAIN, lease_keys(names)).contents
        for name in names:  # sorted, so that two runs cannot wait for each other
            if Lease.from_contents(name, contents).holder != own_branch:
                self._acquire(name, own_branch, location)

    def _iter_held(self, branches: Collection[str]) -> Iterator[str]:
        """Iterate over the names of the leases that one of these run branches holds."""
        namespaces = self._client().entries(
            MAIN,
            filter=f"entry.contentType == 'NAMESPACE' && entry.namespace == '{LEASE_NAMESPACE}'",
            fetch_content=True,
        )
        for entry in namespaces:
            is_lease = entry.key.parent == (LEASE_NAMESPACE,) and entry.key[-1].startswith(_LEASE_PREFIX)
            if not is_lease or not isinstance(entry.content, Namespace):
                continue
            if entry.content.properties.get(LakeProperty.HOLDER) in branches:
                yield entry.key[-1].removeprefix(_LEASE_PREFIX)

    def _acquire(self, name: str, own_branch: str, location: RunLocation | None) -> None:
        started_at = time.monotonic()
        watches: dict[tuple[int, str], HolderWatch] = {}
        while True:
            main_contents = self._client().contents_at(MAIN, lease_keys([name]))
            lease = Lease.from_contents(name, main_contents.contents)
            if lease.holder == own_branch:
                self._log_info(
                    f"The run holds the exclusive lease {name!r} with fencing token {lease.token}."
                )
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
                    self._wait(lease, time.monotonic() - started_at)
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
                continue  # another run was faster, or the outcome is unknown: read again

    def _watch(self, holder: str) -> HolderWatch:
        return HolderWatch(
            holder,
            self._client(),
            self._instance,
            self._load_heartbeats,
            interval_s=self._interval_s,
        )

    def _require_base_lease(self, lease: Lease, own_branch: str, location: RunLocation) -> None:
        """Raise LeaseLost if the lease has changed since the run's base.

        `lease` is the lease on `main` now, which this run does not hold. `location` has the hash of the base;
        if that is empty, the lease must never have been granted. If `own_branch` held the lease at the base,
        the reason is `silent_too_long`, otherwise `taken_over`.
        """
        base_lease = Lease(lease.name)
        if location.base_hash:
            base_lease = Lease.from_contents(
                lease.name, self._client().contents(f"@{location.base_hash}", lease_keys([lease.name]))
            )
        if base_lease == lease:
            return
        raise LeaseLost(
            f"{lease.holder} has taken over the exclusive lease {lease.name!r} with fencing token"
            f" {lease.token}"
            f"{', because this run was silent for too long' if base_lease.holder == own_branch else ''}."
            " Nothing of this run can be published.",
            branch=location.branch,
            run_id=self._run_id,
            hint="Launch a new run. It starts from what the other run has published.",
            reason="silent_too_long" if base_lease.holder == own_branch else "taken_over",
            subject=lease.name,
        )

    def _wait(self, lease: Lease, waited_s: float) -> None:
        if waited_s >= self._wait_s:
            raise LeaseHeld(
                f"{lease.holder} holds the exclusive lease {lease.name!r} (fencing token {lease.token}). It"
                f" is active or waits for its publication. This run has waited for {waited_s:.0f} s.",
                branch=lease.holder,
                run_id=self._run_id,
                hint="Nothing was changed. Launch the run again when the other one has ended, or increase"
                " BRANCHLAKE_EXCLUSIVE_WAIT_S.",
                subject=lease.name,
            )
        # Short enough for the required number of readings within the holder's longest silence.
        time.sleep(min(1.0, MISSED_INTERVALS * self._interval_s / (2 * MIN_READINGS)))
