"""Choose and order the partitions that a compaction rewrites. Pure functions over measures.

A partition is rewritten if it has many small files, or delete files that a reader must apply. The partitions
are ordered by the number of files that disappear per byte that is read, highest first. A partition that does
not fit into the rest of the budget is skipped; a smaller partition after it may still fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from branchlake_dagster.compaction.file_measures import PartitionFiles
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.wording import CodedReason, format_count


class Strategy(StrEnum):
    """How a compaction orders rows in the new files, and which files it rewrites."""

    BIN_PACK = "bin_pack"
    """Rows keep their order. Only small files, and files with deletes, are rewritten."""
    SORT = "sort"
    """All files of the partition are sorted: by `sort_columns`, or else by the table's sort order."""
    Z_ORDER = "z_order"
    """All files of the partition are ordered by the interleaved bits of `sort_columns`."""


MEBIBYTE = 1024 * 1024


_MOST_HOT_MINUTES = 10 * 366 * 24 * 60


@dataclass(frozen=True)
class CompactionOptions:
    """Options of a compaction: which partitions are compacted, how, and within which budgets.

    Args:
        strategy (Strategy): How rows are arranged; also by its name, such as `z_order`. (default:
            bin-packing)
        sort_columns (tuple[str, ...]): The columns of `sort` and `z_order`. `sort` takes Spark's terms, such
            as `id DESC NULLS LAST`.
        small_file_bytes (int): Files below this size are small. (default: 32 MiB)
        max_small_files (int): A partition with more small files is compacted. (default: 50)
        include_hot (bool): Whether to compact partitions into which rows were written recently. Writers add
            new small files to them, and a run is more likely to need the old files. (default: False)
        hot_minutes (float): How long after the last write a partition is hot. (default: 30)
        include_healthy (bool): Whether to rewrite partitions that do not need it, as after a change of the
            sort order. Single files are not rewritten by bin-packing. (default: False)
        max_bytes (Optional[int]): The most bytes of data files that a pass reads for rewriting.
        max_partitions (Optional[int]): The most partitions of a pass.
        max_seconds (Optional[float]): No further rewrite begins after this time. Finished rewrites are
            published.
        unit_bytes (int): The most bytes that one call of Spark rewrites. Between calls, the pass can pause.
            (default: 1 GiB)
        fold_deletes_beside_runs (bool): Whether files with row-level deletes are compacted while runs are
            open. Such a compaction cannot be reversed for a run that needs the old files. (default: False)

    Raises:
        ConfigurationError: The strategy is unknown, the columns do not fit it, a number of bytes or
            partitions is not positive, `max_seconds`, `max_small_files` or `hot_minutes` is negative, or
            `hot_minutes` exceeds ten years.

    Examples:
        .. code-block:: python

            from branchlake_dagster import CompactionOptions, MaintenanceOptions, maintenance_definitions

            options = CompactionOptions(max_small_files=20, max_bytes=20 * 1024**3)
            maintenance = maintenance_definitions(["shop"], options=MaintenanceOptions(compaction=options))
    """

    strategy: Strategy = Strategy.BIN_PACK
    sort_columns: tuple[str, ...] = ()
    small_file_bytes: int = 32 * MEBIBYTE
    max_small_files: int = 50
    include_hot: bool = False
    hot_minutes: float = 30.0
    include_healthy: bool = False
    max_bytes: int | None = None
    max_partitions: int | None = None
    max_seconds: float | None = None
    unit_bytes: int = 1024 * MEBIBYTE
    fold_deletes_beside_runs: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in [*Strategy]:
            raise ConfigurationError(
                f"{self.strategy!r} is not a strategy of a compaction.",
                hint=f"The strategies are {', '.join(Strategy)}.",
                reason="unknown_strategy",
                subject=str(self.strategy),
            )
        object.__setattr__(self, "strategy", Strategy(self.strategy))
        columns: object = self.sort_columns
        if isinstance(columns, str):
            raise ConfigurationError(
                f"sort_columns is the text {columns!r}.",
                hint=f"Write a tuple of columns: sort_columns=({columns!r},).",
                reason="not_a_sequence",
                subject="sort_columns",
            )
        if self.strategy is Strategy.Z_ORDER and not self.sort_columns:
            raise ConfigurationError(
                "The strategy z_order needs columns.", hint="Name the columns of the filters of your queries."
            )
        if self.strategy is Strategy.BIN_PACK and self.sort_columns:
            raise ConfigurationError(
                "The strategy bin_pack does not take columns.", hint="Choose the strategy sort or z_order."
            )
        limits = (self.small_file_bytes, self.unit_bytes, self.max_bytes, self.max_partitions)
        has_negative_time = self.max_seconds is not None and not self.max_seconds >= 0
        if has_negative_time or any(limit is not None and not limit > 0 for limit in limits):
            raise ConfigurationError("A limit of a compaction is not positive.", hint="Leave it out instead.")
        if not self.max_small_files >= 0 or not 0 <= self.hot_minutes <= _MOST_HOT_MINUTES:
            raise ConfigurationError(
                "max_small_files or hot_minutes of a compaction is negative, or too large.",
                hint="Leave them out instead.",
            )


@dataclass(frozen=True)
class PlannedPartition:
    """A partition that is to be rewritten, and the reason.

    `files` and `bytes` are the number and size of the data files to rewrite, `expected_files` the expected
    number of new files.
    """

    measured: PartitionFiles
    reason: CodedReason
    files: int
    bytes: int
    expected_files: int

    @property
    def removed_files(self) -> int:
        """The expected decrease of the number of data and delete files."""
        return self.files + self.measured.delete_files - self.expected_files

    @property
    def benefit(self) -> float:
        """The number of files that disappear per MiB that is read."""
        return self.removed_files / max(self.bytes / MEBIBYTE, 1 / MEBIBYTE)


@dataclass(frozen=True)
class SkippedPartition:
    """A partition that needs a compaction but is not in this plan, and the reason."""

    measured: PartitionFiles
    reason: CodedReason


@dataclass(frozen=True)
class CompactionPlan:
    """The partitions to rewrite, ordered by benefit, and the partitions that are skipped for now.

    `unreadable` maps tables whose metadata or manifests cannot be read to their errors.
    """

    options: CompactionOptions
    partitions: tuple[PlannedPartition, ...] = ()
    skipped: tuple[SkippedPartition, ...] = ()
    healthy: int = 0
    """The number of measured partitions that do not need a compaction."""
    unreadable: Mapping[str, Exception] = field(default_factory=dict)

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of tables with planned partitions, ordered by each table's first planned partition."""
        return tuple(dict.fromkeys(one.measured.table for one in self.partitions))

    @property
    def bytes(self) -> int:
        """The size of all data files to rewrite."""
        return sum(one.bytes for one in self.partitions)


@dataclass
class _Budget:
    bytes_left: float
    partitions_left: float

    def take(self, planned: PlannedPartition) -> bool:
        """Subtract a partition from the budget and return True; return False if it does not fit."""
        if planned.bytes > self.bytes_left or self.partitions_left < 1:
            return False
        self.bytes_left -= planned.bytes
        self.partitions_left -= 1
        return True


def plan_partitions(
    measures: Iterable[PartitionFiles], options: CompactionOptions, *, now: datetime
) -> CompactionPlan:
    """Choose and order the partitions to rewrite. A partition is hot by its last write before `now`."""
    measures = list(measures)
    # Spark also selects files of older partition specs by the predicate of a partition, so none is selected.
    old_partitions: dict[str, list[str]] = {}
    for measured in measures:
        if not measured.is_current_spec:
            old_partitions.setdefault(measured.table, []).append(measured.partition)
    candidates: list[PlannedPartition] = []
    skipped: list[SkippedPartition] = []
    healthy = 0
    for measured in measures:
        planned = _plan_partition(measured, options)
        if planned is None:
            healthy += 1
        elif old_names := old_partitions.get(measured.table):
            sentence = (
                f"{format_count(len(old_names), 'partition')} of the table still have files of an older"
                f" partition spec, such as {min(old_names) or 'the whole table'}"
            )
            skipped.append(SkippedPartition(measured, CodedReason(sentence, "older_partition_spec")))
        elif obstacle := _find_obstacle(measured, options, now):
            skipped.append(SkippedPartition(measured, obstacle))
        else:
            candidates.append(planned)
    candidates.sort(key=lambda one: (-one.benefit, one.measured.table, one.measured.partition))
    budget = _Budget(
        math.inf if options.max_bytes is None else options.max_bytes,
        math.inf if options.max_partitions is None else options.max_partitions,
    )
    chosen = []
    for planned in candidates:
        if budget.take(planned):
            chosen.append(planned)
        else:
            reason = CodedReason("it does not fit into the budget of this pass", "over_budget")
            skipped.append(SkippedPartition(planned.measured, reason))
    return CompactionPlan(options, tuple(chosen), tuple(skipped), healthy)


def _plan_partition(measured: PartitionFiles, options: CompactionOptions) -> PlannedPartition | None:
    """Return the planned compaction of a partition; None if the partition does not need a compaction."""
    reason = _find_reason(measured, options)
    if reason is None:
        return None
    is_whole = options.strategy is not Strategy.BIN_PACK
    files = measured.files if is_whole else measured.candidate_files
    size = measured.bytes if is_whole else measured.candidate_bytes
    expected = max(1, math.ceil(size / measured.target_bytes))
    return PlannedPartition(measured, reason, files, size, min(expected, files))


def _find_reason(measured: PartitionFiles, options: CompactionOptions) -> CodedReason | None:
    if measured.delete_files:
        return CodedReason("readers must apply delete files", "delete_files")
    if measured.small_files > options.max_small_files:
        return CodedReason("it has many small files", "small_files")
    if options.include_healthy and (
        options.strategy is not Strategy.BIN_PACK or measured.candidate_files > 1
    ):
        return CodedReason("the options include partitions that are not due", "asked_for")
    return None


def _find_obstacle(measured: PartitionFiles, options: CompactionOptions, now: datetime) -> CodedReason | None:
    if measured.predicate is None:
        return CodedReason("Spark's SQL cannot select it by its partition values", "not_selectable")
    last_write = measured.last_write
    is_hot = last_write is not None and now - last_write < timedelta(minutes=options.hot_minutes)
    if is_hot and not options.include_hot:
        return CodedReason(f"rows were written to it in the last {options.hot_minutes:g} minutes", "hot")
    return None


def split_into_units(
    partitions: Iterable[PlannedPartition], *, unit_bytes: int, unit_partitions: int = 100
) -> list[list[PlannedPartition]]:
    """Split partitions of one table into units, each for one call of Spark. The order is preserved.

    A unit has at most `unit_partitions` partitions and `unit_bytes` bytes; a larger partition is a unit of
    its own.
    """
    units: list[list[PlannedPartition]] = []
    size = 0
    for planned in partitions:
        if not units or len(units[-1]) >= unit_partitions or size + planned.bytes > unit_bytes:
            units.append([])
            size = 0
        units[-1].append(planned)
        size += planned.bytes
    return units
