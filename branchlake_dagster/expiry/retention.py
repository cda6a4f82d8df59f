"""Decides which snapshots of one table stay. Pure functions over plain values.

The kept snapshots are one contiguous chain, from the oldest that anything needs to the current one. A rebase,
an undo and a consumer each follow the parents of the current snapshot back to a snapshot that they know. A
gap in the chain would look to them like a rollback. Iceberg's tags and other branches may need older
snapshots; these stay outside the chain.
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
    """How long snapshots stay that no reference, run or consumer needs.

    The newest `keep_count` snapshots stay, and all that are younger than `keep_age`. A snapshot that a
    consumer's position names stays for `position_age`, counted from the snapshot's time; an older position is
    given up, and its consumer must compute everything anew. With `position_count`, positions keep no more
    snapshots than that number either. Publications of the last `undo_age` can be undone.

    The maintenance uses `from_settings` if its options have no policy.

    Raises ConfigurationError for a number below 1 or a negative time.

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
        """Return the policy of a lake: `BRANCHLAKE_SNAPSHOT_KEEP_COUNT` and the settings beside it.

        The time of undo never exceeds the history horizon, because an undo reads an earlier commit.
        """
        return cls(
            keep_count=settings.snapshot_keep_count,
            keep_age=timedelta(days=settings.snapshot_keep_days),
            position_age=timedelta(days=settings.position_days),
            undo_age=min(timedelta(days=settings.undo_days), settings.history_horizon),
        )

    def __post_init__(self) -> None:
        if self.keep_count < 1:
            raise ConfigurationError(
                f"keep_count is {self.keep_count}. A table keeps at least its current snapshot.",
                hint="Set keep_count to 1 or more.",
            )
        for name in ("keep_age", "position_age", "undo_age"):
            if getattr(self, name) < timedelta(0):
                raise ConfigurationError(
                    f"{name} is negative: {getattr(self, name)}.", hint=f"Set {name} to 0 or more."
                )


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """What the decision needs of one snapshot. `timestamp_ms` is its time in ms since 1970.

    `replayed_from` is the snapshot on a run's branch that it repeats on `main`.
    """

    snapshot_id: int
    parent_id: int | None
    timestamp_ms: int
    replayed_from: int | None = None


@dataclass(frozen=True)
class TableReference:
    """A branch or tag of the Iceberg table itself, with the retention that it sets for its own snapshots."""

    snapshot_id: int
    is_branch: bool = False
    min_snapshots: int | None = None
    max_age_ms: int | None = None


@dataclass(frozen=True)
class TableHistory:
    """The snapshots of a table in the order of its metadata, its current snapshot, and its references.

    `min_snapshots` and `max_age_ms` are the retention in the table's properties, for branches that set none.
    """

    snapshots: Sequence[SnapshotFacts]
    current_id: int | None
    references: Mapping[str, TableReference] = field(default_factory=dict)
    min_snapshots: int | None = None
    max_age_ms: int | None = None

    @property
    def by_id(self) -> dict[int, SnapshotFacts]:
        """The snapshots by id."""
        return {snapshot.snapshot_id: snapshot for snapshot in self.snapshots}


@dataclass(frozen=True)
class ConsumerPosition:
    """A snapshot of a table up to which a consumer has consumed it. `consumer` is the consumer's table."""

    consumer: str
    snapshot_id: int


def resolve_position(history: TableHistory, position: Position) -> int | None:
    """Return the oldest snapshot that a consumer at `position` needs; None if it needs none that exists.

    The consumer reads the parents of the current snapshot back to the returned one.
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
    """The snapshots of one table that are needed, with all later ones.

    `bases` maps a snapshot to the first reference that needs it: a run's branch, a discarded branch, or the
    horizon of undo.
    """

    bases: Mapping[int, str] = field(default_factory=dict)
    positions: tuple[ConsumerPosition, ...] = ()


class KeptBy(StrEnum):
    """What needs the oldest snapshot of the chain."""

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
    """A consumer's position that is too old to keep its snapshots."""

    consumer: str
    snapshot_id: int
    timestamp_ms: int


@dataclass(frozen=True)
class Retention:
    """The decision for one table.

    `expired_ids` are removed. `oldest_id` is the oldest snapshot of the chain, which `kept_by` needs;
    `holder` is the reference or the consumer's table, empty for a rule of the policy or of the table's
    properties. `given_up` are positions whose snapshots are among the expired ones.
    """

    kept_ids: frozenset[int]
    expired_ids: frozenset[int]
    oldest_id: int | None = None
    kept_by: KeptBy = KeptBy.CURRENT
    holder: str = ""
    given_up: tuple[GivenUpPosition, ...] = ()


def list_ancestors(history: TableHistory, snapshot_id: int | None) -> list[SnapshotFacts]:
    """Return a snapshot and its ancestors that still exist without a gap, newest first."""
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
) -> Retention:
    """Decide which snapshots stay. `now_ms` is the present time in ms since 1970.

    Costs one pass over the snapshots.
    """
    chain = list_ancestors(history, history.current_id)
    depths = {snapshot.snapshot_id: depth for depth, snapshot in enumerate(chain)}
    oldest_depth, kept_by, holder = _extend_chain(history, chain, depths, roots, policy, now_ms)
    kept_ids = {snapshot.snapshot_id for snapshot in chain[: oldest_depth + 1]}
    kept_ids |= _list_referenced(history, policy, now_ms)
    kept_ids |= {
        # Rolled back, or staged by another engine: nothing leads to it, so only its age counts.
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
    return Retention(
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
    """Return the depth of the oldest snapshot that anything needs, what needs it, and its holder."""
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
    """Return what the table's properties and its branches at the current snapshot keep of the chain."""
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
    """Return the depth of the oldest snapshot that is younger than `age_ms`; 0 if there is none."""
    return max((depth for depth, one in enumerate(chain) if _is_younger(one, age_ms, now_ms)), default=0)


def _keeps_position(chain: Sequence[SnapshotFacts], depth: int, policy: ExpiryPolicy, now_ms: int) -> bool:
    is_few = policy.position_count is None or depth < policy.position_count
    return is_few and _is_younger(chain[depth], _to_ms(policy.position_age), now_ms)


def _list_referenced(history: TableHistory, policy: ExpiryPolicy, now_ms: int) -> set[int]:
    """Return the snapshots of the table's own tags and branches, with the ancestors that a branch keeps.

    A branch of the table keeps ancestors by its own retention. If it has none, the policy and the table's
    properties decide, whichever keeps more. What branches at the current snapshot keep is part of the chain.
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
    """Return the number in a table property of Iceberg's expiry; None if it is missing or not above 0."""
    value = properties.get(name, "").strip()
    return int(value) or None if value.isdecimal() else None


def keep_suffix(snapshot_ids: Iterable[int], kept_ids: frozenset[int]) -> int:
    """Return how many of the first entries of a snapshot log are dropped.

    All entries before the last expired one are dropped. Iceberg's specification forbids a gap in the log,
    because a query for a time in the gap would get a wrong snapshot.
    """
    dropped_count = 0
    for index, snapshot_id in enumerate(snapshot_ids):
        if snapshot_id not in kept_ids:
            dropped_count = index + 1
    return dropped_count
