"""Decide which snapshots of one table are kept. Pure functions: they read neither Nessie nor files.

The kept snapshots are one contiguous chain of ancestors, from the oldest needed snapshot to the current
snapshot. A rebase, an undo and a consumer each follow the parents of the current snapshot back to a snapshot
whose id they have recorded. A gap in the chain would look to them like a rollback. Tags and other branches of
the Iceberg table may need other snapshots; these are kept outside the chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.history.change import Position

if TYPE_CHECKING:
    from branchlake_dagster.settings import Settings

MIN_SNAPSHOTS_PROPERTY = "history.expire.min-snapshots-to-keep"
MAX_AGE_PROPERTY = "history.expire.max-snapshot-age-ms"


@dataclass(frozen=True)
class ExpiryPolicy:
    """The rules that decide how long snapshots are kept, besides those that references and runs need.

    The newest `keep_count` snapshots are kept, and all snapshots that are younger than `keep_age`. A snapshot
    at a consumer's position is kept for `position_age`, counted from the snapshot's time. An older position
    is given up: its snapshot may expire, and then the consumer must compute all its rows again. If
    `position_count` is set, a position also keeps its snapshot only while this is one of the newest
    `position_count` snapshots. Publications of the last `undo_age` can be undone.

    The maintenance uses `from_settings` if its options have no policy.

    Raises ConfigurationError for a count below 1 or a negative time.

    Examples:
        .. code-block:: python

            from datetime import timedelta

            from branchlake_dagster import ExpiryPolicy, MaintenanceOptions, maintenance_definitions

            policy = ExpiryPolicy(keep_count=500, keep_age=timedelta(days=14))
            maintenance = maintenance_definitions(["shop"], options=MaintenanceOptions(expiry=policy))
    """

    keep_count: int = 100
    keep_age: timedelta = timedelta(days=7)
    position_age: timedelta = timedelta(days=30)
    undo_age: timedelta = timedelta(days=7)
    position_count: int | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> ExpiryPolicy:
        """Create the policy of a lake from its settings, such as `BRANCHLAKE_SNAPSHOT_KEEP_COUNT`.

        `undo_age` is at most the history horizon, because an undo reads an earlier commit.
        """
        return cls(
            keep_count=settings.snapshot_keep_count,
            keep_age=timedelta(days=settings.snapshot_keep_days),
            position_age=timedelta(days=settings.position_days),
            undo_age=min(timedelta(days=settings.undo_days), settings.history_horizon),
        )

    def __post_init__(self) -> None:
        if not self.keep_count >= 1:
            raise ConfigurationError(
                f"keep_count is {self.keep_count}. A table keeps at least its current snapshot.",
                hint="Set keep_count to 1 or more.",
            )
        if self.position_count is not None and not self.position_count >= 1:
            raise ConfigurationError(
                f"position_count is {self.position_count}.", hint="Set it to 1 or more, or leave it out."
            )
        for name in ("keep_age", "position_age", "undo_age"):
            if getattr(self, name) < timedelta(0):
                raise ConfigurationError(
                    f"{name} is negative: {getattr(self, name)}.", hint=f"Set {name} to 0 or more."
                )


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """The fields of one snapshot that decide whether it is kept. `timestamp_ms` is in ms since 1970.

    If a rebase created this snapshot on `main`, `replayed_from` is the id of the snapshot on the run's branch
    that it repeats; otherwise None.
    """

    snapshot_id: int
    parent_id: int | None
    timestamp_ms: int
    replayed_from: int | None = None


@dataclass(frozen=True)
class TableReference:
    """A branch or tag of the Iceberg table itself, not of Nessie.

    A branch keeps its newest `min_snapshots` snapshots, and all snapshots younger than `max_age_ms`. A field
    is None if the branch does not set it; tags set neither.
    """

    snapshot_id: int
    is_branch: bool = False
    min_snapshots: int | None = None
    max_age_ms: int | None = None


@dataclass(frozen=True)
class TableHistory:
    """The snapshots of a table in the order of its metadata, its current snapshot, and its references.

    `min_snapshots` and `max_age_ms` are the retention in the table's properties; None if they are not set.
    They apply to branches of the table without retention of their own.
    """

    snapshots: Sequence[SnapshotFacts]
    current_id: int | None
    references: Mapping[str, TableReference] = field(default_factory=dict)
    min_snapshots: int | None = None
    max_age_ms: int | None = None

    @property
    def by_id(self) -> dict[int, SnapshotFacts]:
        """The snapshots by snapshot id."""
        return {snapshot.snapshot_id: snapshot for snapshot in self.snapshots}


@dataclass(frozen=True)
class ConsumerPosition:
    """The snapshot up to which a consumer has read a table.

    `consumer` is the name of the consumer's table.
    """

    consumer: str
    snapshot_id: int


def resolve_position(history: TableHistory, position: Position) -> int | None:
    """Return the id of the oldest snapshot that a consumer at `position` needs; None if none exists.

    The consumer follows the parents of the current snapshot back to this snapshot.
    """
    snapshot_ids = {snapshot.snapshot_id for snapshot in history.snapshots}
    unpublished_ids = position.unpublished_snapshots
    if unpublished_ids and unpublished_ids[-1] in snapshot_ids:
        return unpublished_ids[-1]
    if position.snapshot_id is not None:
        return position.snapshot_id if position.snapshot_id in snapshot_ids else None
    if not unpublished_ids or not any(one.replayed_from in unpublished_ids for one in history.snapshots):
        return None
    # The consumer's run created the table, and so did another run: the consumer reads from the beginning.
    ancestors = list_ancestors(history, history.current_id)
    return ancestors[-1].snapshot_id if ancestors else None


@dataclass(frozen=True)
class TableRoots:
    """The snapshots of one table that references and consumers need, together with all later snapshots.

    `bases` maps a snapshot id to the first reference that needs the snapshot: `main`, a run's branch, a
    discarded branch, or `undo` for the horizon of undo.
    """

    bases: Mapping[int, str] = field(default_factory=dict)
    positions: tuple[ConsumerPosition, ...] = ()


class KeptBy(StrEnum):
    """The rule that keeps the oldest of a table's kept snapshots."""

    CURRENT = "current"
    COUNT = "count"
    AGE = "age"
    BASE = "base"
    """An open run, a discarded branch, or the horizon of undo."""
    POSITION = "position"
    RETENTION = "retention"
    """A branch of the Iceberg table, or the table's properties."""


@dataclass(frozen=True)
class GivenUpPosition:
    """A consumer's position whose snapshot expires because it is too old. The time is in ms since 1970."""

    consumer: str
    snapshot_id: int
    timestamp_ms: int


@dataclass(frozen=True)
class SnapshotRetention:
    """The decision for one table.

    The snapshots with `expired_ids` are to be removed. `oldest_id` is the oldest kept snapshot of the chain;
    None if the table is empty. `kept_by` is the rule that keeps it, and `holder` the reference or consumer's
    table that needs it: empty if only the policy or the table's properties keep it. `given_up` are the
    consumers' positions whose snapshots are in `expired_ids`.
    """

    kept_ids: frozenset[int]
    expired_ids: frozenset[int]
    oldest_id: int | None = None
    kept_by: KeptBy = KeptBy.CURRENT
    holder: str = ""
    given_up: tuple[GivenUpPosition, ...] = ()


def list_ancestors(history: TableHistory, snapshot_id: int | None) -> list[SnapshotFacts]:
    """Return a snapshot and its ancestors up to the first that does not exist any more, newest first.

    The result is empty if `snapshot_id` is None or not in `history`.
    """
    by_id = history.by_id
    ancestors: list[SnapshotFacts] = []
    seen_ids: set[int] = set()
    while snapshot_id is not None and snapshot_id in by_id and snapshot_id not in seen_ids:
        seen_ids.add(snapshot_id)
        ancestors.append(by_id[snapshot_id])
        snapshot_id = by_id[snapshot_id].parent_id
    return ancestors


def decide_retention(
    history: TableHistory, roots: TableRoots, policy: ExpiryPolicy, now_ms: int
) -> SnapshotRetention:
    """Decide which snapshots are kept and which expire. `now_ms` is the present time in ms since 1970.

    Costs a few passes over the snapshots, and one more for each branch of the Iceberg table.
    """
    chain = list_ancestors(history, history.current_id)
    depths = {snapshot.snapshot_id: depth for depth, snapshot in enumerate(chain)}
    oldest_depth, kept_by, holder = _extend_chain(history, chain, depths, roots, policy, now_ms)
    kept_ids = {snapshot.snapshot_id for snapshot in chain[: oldest_depth + 1]}
    kept_ids |= _list_referenced(history, policy, now_ms)
    kept_ids |= {
        # Rolled back, or staged by another engine: not an ancestor, so only its age and bases count.
        snapshot.snapshot_id
        for snapshot in history.snapshots
        if snapshot.snapshot_id not in depths
        and (_is_younger(snapshot, _to_ms(policy.keep_age), now_ms) or snapshot.snapshot_id in roots.bases)
    }
    by_id = history.by_id
    given_up = {
        GivenUpPosition(
            position.consumer, position.snapshot_id, by_id[position.snapshot_id].timestamp_ms
        ): None
        for position in roots.positions
        if position.snapshot_id in by_id and position.snapshot_id not in kept_ids
    }
    return SnapshotRetention(
        kept_ids=frozenset(kept_ids),
        expired_ids=frozenset(by_id.keys() - kept_ids),
        oldest_id=chain[oldest_depth].snapshot_id if chain else None,
        kept_by=kept_by,
        holder=holder,
        given_up=tuple(given_up),
    )


def _extend_chain(
    history: TableHistory,
    chain: Sequence[SnapshotFacts],
    depths: Mapping[int, int],
    roots: TableRoots,
    policy: ExpiryPolicy,
    now_ms: int,
) -> tuple[int, KeptBy, str]:
    """Return the depth in `chain` of the oldest needed snapshot, the rule that keeps it, and its holder.

    Depth 0 is the current snapshot.
    """
    oldest = (0, KeptBy.CURRENT, "")
    candidates: list[tuple[int, KeptBy, str]] = [(min(policy.keep_count, len(chain)) - 1, KeptBy.COUNT, "")]
    candidates.append((_find_age_depth(chain, _to_ms(policy.keep_age), now_ms), KeptBy.AGE, ""))
    candidates += _list_own_retention(history, chain, now_ms)
    candidates += [
        (depths[snapshot_id], KeptBy.BASE, holder)
        for snapshot_id, holder in roots.bases.items()
        if snapshot_id in depths
    ]
    candidates += [
        (depths[position.snapshot_id], KeptBy.POSITION, position.consumer)
        for position in roots.positions
        if position.snapshot_id in depths
        and _keeps_position(chain, depths[position.snapshot_id], policy, now_ms)
    ]
    for candidate in candidates:
        if candidate[0] > oldest[0]:
            oldest = candidate
    return oldest


def _list_own_retention(
    history: TableHistory, chain: Sequence[SnapshotFacts], now_ms: int
) -> list[tuple[int, KeptBy, str]]:
    """Return how much of the chain the table's properties and its branches at the current snapshot keep.

    Each element is the depth of the oldest kept snapshot, the rule, and the branch's name; the name is empty
    for the table's properties.
    """
    retentions = {"": TableReference(0, min_snapshots=history.min_snapshots, max_age_ms=history.max_age_ms)}
    retentions |= {
        name: reference
        for name, reference in history.references.items()
        if reference.is_branch and reference.snapshot_id == history.current_id
    }
    candidates = []
    for holder, retention in retentions.items():
        depth = min(retention.min_snapshots or 1, len(chain)) - 1
        if retention.max_age_ms is not None:
            # Not a timedelta: Java's greatest long is a usual value, and overflows it.
            depth = max(depth, _find_age_depth(chain, retention.max_age_ms, now_ms))
        candidates.append((depth, KeptBy.RETENTION, holder))
    return candidates


def _find_age_depth(chain: Sequence[SnapshotFacts], age_ms: float, now_ms: int) -> int:
    """Return the index in `chain` of the oldest snapshot that is younger than `age_ms`; 0 if none is.

    `chain` has the newest snapshot first. `age_ms` is a duration in ms, `now_ms` a time in ms since 1970.
    """
    return max((depth for depth, one in enumerate(chain) if _is_younger(one, age_ms, now_ms)), default=0)


def _keeps_position(chain: Sequence[SnapshotFacts], depth: int, policy: ExpiryPolicy, now_ms: int) -> bool:
    is_few = policy.position_count is None or depth < policy.position_count
    return is_few and _is_younger(chain[depth], _to_ms(policy.position_age), now_ms)


def _list_referenced(history: TableHistory, policy: ExpiryPolicy, now_ms: int) -> set[int]:
    """Return the ids of snapshots at the table's own tags and branches, and of ancestors that branches keep.

    A branch of the table keeps ancestors by its own retention. If it has none, the policy and the table's
    properties decide, whichever keeps more. Ancestors that a branch at the current snapshot keeps are
    omitted: they are part of the chain.
    """
    referenced_ids: set[int] = set()
    by_id = history.by_id
    for reference in history.references.values():
        if reference.snapshot_id not in by_id:
            continue
        referenced_ids.add(reference.snapshot_id)
        if not reference.is_branch or reference.snapshot_id == history.current_id:
            continue
        count = reference.min_snapshots or max(policy.keep_count, history.min_snapshots or 0)
        age_ms = max(_to_ms(policy.keep_age), history.max_age_ms or 0)
        if reference.max_age_ms is not None:
            age_ms = reference.max_age_ms
        ancestors = list_ancestors(history, reference.snapshot_id)
        last_depth = max(count - 1, _find_age_depth(ancestors, age_ms, now_ms))
        referenced_ids |= {snapshot.snapshot_id for snapshot in ancestors[: last_depth + 1]}
    return referenced_ids


def _is_younger(snapshot: SnapshotFacts, age_ms: float, now_ms: int) -> bool:
    return now_ms - snapshot.timestamp_ms < age_ms


def _to_ms(age: timedelta) -> float:
    return age.total_seconds() * 1000


def parse_retention(properties: Mapping[str, str], name: str) -> int | None:
    """Return the table property `name` of Iceberg's expiry as a number; None unless it is above 0."""
    value = properties.get(name, "").strip()
    return int(value) or None if value.isdecimal() else None


def keep_suffix(snapshot_ids: Iterable[int], kept_ids: frozenset[int]) -> int:
    """Return how many entries must be dropped from the beginning of a snapshot log.

    `snapshot_ids` are the log's entries, oldest first. The last entry of an expired snapshot is dropped, and
    all entries before it; the result is 0 if no snapshot of the log expires. Iceberg's specification forbids
    a gap in the log, because a query for a time in the gap would get a wrong snapshot.
    """
    dropped_count = 0
    for index, snapshot_id in enumerate(snapshot_ids):
        if snapshot_id not in kept_ids:
            dropped_count = index + 1
    return dropped_count
