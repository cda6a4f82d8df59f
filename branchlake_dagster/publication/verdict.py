"""The quality gate: derive a verdict from evidence, and block if evidence is missing. Pure functions.

Evidence (`RunEvidence`) records what a finished run did and which rules its assets have.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from branchlake_dagster.lakehouse.lakehouse import sql_name
from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster.runs.run_events import EventPosition, RecordedHead, StepOfRun
from branchlake_dagster.stored_names import CHANGE_TABLE_INFIX
from branchlake_dagster.wording import CodedReason, format_names

CheckName = tuple[str, str]
"""(asset key as text, check name)."""
CheckedRows = tuple[CheckName, str | None]
"""(check, partition). The partition is None for a result without a partition."""


@dataclass(frozen=True)
class CheckEvaluation:
    """The last result of one check. `is_blocking` is True if its severity is ERROR, passed or not."""

    passed: bool
    is_blocking: bool
    position: EventPosition
    step_key: str | None
    description: str
    failing_rows: int | None = None
    """The number of rows that fail the check; None if the check does not count them."""
    attempt: int = 0
    """How often the step was repeated in its run before this event."""
    table: str | None = None
    """The dotted name of the checked asset's table; None if its key cannot name a table."""
    step_start: EventPosition | None = None
    """The start of this attempt of the step; None if no step evaluated the check."""
    run_id: str = ""

    @property
    def step(self) -> StepOfRun:
        """The step that evaluated the check."""
        return StepOfRun(self.run_id, self.step_key or "")


@dataclass(frozen=True)
class WrittenPartition:
    """A materialization on the run's branch, with the numbers that it reported.

    `rows` is the row count of the whole table on the branch, `partition_rows` that of the partition.
    `timestamp` is in seconds since 1970. `is_whole_partition` is True if the run replaced the partition, so
    that the published partition holds only its rows. `preview` is a sample of rows as Markdown. A field is
    None if the materialization did not report it.
    """

    position: EventPosition
    step_key: str | None
    run_id: str = ""
    rows: int | None = None
    partition_rows: int | None = None
    timestamp: float = 0.0
    is_whole_partition: bool = False
    preview: str | None = None
    attempt: int = 0
    """How often the step was repeated in its run before this event."""


@dataclass(frozen=True)
class AssetRules:
    """The rules of an asset in the current definitions.

    `table` is the dotted name of its table; None if its key cannot name a table. `checks` are the names of
    its checks. `demands_checks` is true if the asset may not be published without a check.
    `whole_table_checks` has the names of the tables that each check reads, for checks that read all rows.
    `serializable` is true if the asset declares serializable isolation. `upstream_tables` are the tables of
    the assets that it depends on. `lease_name` is the name of its exclusive lease, or None. `columns_frozen`
    is true if runs may not change its columns.
    """

    table: str | None
    checks: frozenset[str]
    demands_checks: bool
    whole_table_checks: Mapping[str, frozenset[str]] = field(default_factory=dict)
    serializable: bool = False
    upstream_tables: frozenset[str] = frozenset()
    lease_name: str | None = None
    columns_frozen: bool = False


@dataclass(frozen=True)
class RunEvidence:
    """All facts that the verdict on a run depends on.

    `evaluations` has the last result by (check, partition), `written_partitions` the last materialization by
    (asset, partition), and `rules` the rules of each written asset. The partition is None for an event
    without a partition. `write_set` has the dotted names of the changed tables, views and functions.
    """

    run_id: str
    succeeded: bool
    planned_checks: frozenset[CheckedRows] = frozenset()
    skipped_checks: frozenset[CheckedRows] = frozenset()
    """The planned checks whose steps did not evaluate them because an output was skipped.

    Checks of tables that the run changed are never among them.
    """
    evaluations: Mapping[tuple[CheckName, str | None], CheckEvaluation] = field(default_factory=dict)
    written_partitions: Mapping[tuple[str, str | None], WrittenPartition] = field(default_factory=dict)
    rules: Mapping[str, AssetRules] = field(default_factory=dict)
    write_set: frozenset[str] = frozenset()
    loaded_tables: frozenset[tuple[str | None, str]] = frozenset()
    """(step, table) of every input that the IO manager loaded."""
    read_tables: frozenset[str] = frozenset()
    """The tables that serializable assets read by SQL or through the catalog, in any step."""
    unnamed_reads: frozenset[str] = frozenset()
    """Descriptions of reads by serializable assets whose tables are not known."""
    recorded_heads: tuple[RecordedHead, ...] = ()
    """The branch hashes that the runs recorded after their writes."""
    spark_applications: frozenset[str] = frozenset()
    """The ids of the Spark applications whose sessions the code of the runs used."""
    step_ends: Mapping[StepOfRun, EventPosition] = field(default_factory=dict)
    """The last end of each step. A step that was killed has none."""
    run_ids: tuple[str, ...] = ()
    """The runs that worked on the branch, oldest first."""
    code_writers: Mapping[str, frozenset[StepOfRun]] = field(default_factory=dict)
    """The steps whose code changed a checked table by SQL or the catalog, by the table's dotted name."""
    later_changes: Mapping[CheckedRows, str] = field(default_factory=dict)
    """The message of a commit that changed a check's table after the check had started, by check."""
    repeated_steps: Mapping[StepOfRun, int] = field(default_factory=dict)
    """How often each repeated step was repeated in its run."""
    late_attempts: Mapping[str, str] = field(default_factory=dict)
    """The step whose earlier attempt committed after a later one had begun, by the table's dotted name."""
    changed_columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The columns that differ between base and branch, by frozen table; without unchanged tables."""

    @property
    def read_set(self) -> frozenset[str] | None:
        """The tables that must be unchanged on `main` since the run's base; None if no asset is serializable.

        For each serializable asset these are its declared upstream tables, the inputs loaded for it, and the
        tables that it read itself.
        """
        strict_assets = self.serializable_assets
        if not strict_assets:
            return None
        step_keys = {
            written.step_key
            for (asset, _), written in self.written_partitions.items()
            if asset in strict_assets
        }
        declared_tables = {table for asset in strict_assets for table in self.rules[asset].upstream_tables}
        return frozenset(
            declared_tables
            | self.read_tables
            | {table for step_key, table in self.loaded_tables if step_key in step_keys}
        )

    @property
    def branch_heads(self) -> frozenset[str]:
        """The branch hashes that the runs recorded."""
        return frozenset(head.hash for head in self.recorded_heads)

    @cached_property
    def partitions_by_asset(self) -> Mapping[str, frozenset[str | None]]:
        """The materialized partitions of each written asset. None stands for an event without a partition."""
        partitions: dict[str, set[str | None]] = {}
        for asset, partition in self.written_partitions:
            partitions.setdefault(asset, set()).add(partition)
        return {asset: frozenset(keys) for asset, keys in partitions.items()}

    @cached_property
    def _materializing_steps(self) -> frozenset[tuple[str, StepOfRun]]:
        return frozenset(
            (asset, StepOfRun(written.run_id, written.step_key))
            for (asset, _), written in self.written_partitions.items()
            if written.step_key is not None
        )

    @cached_property
    def _run_indexes(self) -> Mapping[str, int]:
        return {run_id: index for index, run_id in enumerate(self.run_ids)}

    def is_own_step(self, rows: CheckedRows, result: CheckEvaluation) -> bool:
        """Return whether the step that evaluated a check also materialized the checked asset."""
        (asset, _), _ = rows
        return result.step_key is not None and (asset, result.step) in self._materializing_steps

    def find_check_time(self, rows: CheckedRows, result: CheckEvaluation) -> EventPosition:
        """Return the position of the event after which a table must not change any more.

        This is the start of the check's step. For a step that evaluates checks of its own asset it is the
        step's end, because the step may change the table that it materializes.
        """
        if self.is_own_step(rows, result):
            return self.find_step_end(result.step)
        return result.step_start or result.position

    def find_step_end(self, step: StepOfRun) -> EventPosition:
        """Return the position of a step's last end. A step that was killed ended with its run."""
        run_index = self._run_indexes.get(step.run_id, len(self.run_ids))
        return self.step_ends.get(step) or EventPosition.end_of_run(run_index)

    @property
    def serializable_assets(self) -> frozenset[str]:
        """The written assets that ask for serializable isolation."""
        return frozenset(asset for asset, rules in self.rules.items() if rules.serializable)

    @property
    def leases(self) -> frozenset[str]:
        """The names of the exclusive leases that the written assets need."""
        return frozenset(rules.lease_name for rules in self.rules.values() if rules.lease_name)

    @property
    def fully_checked_tables(self) -> frozenset[str]:
        """The tables of which at least one check reads all rows."""
        table_sets = (tables for rules in self.rules.values() for tables in rules.whole_table_checks.values())
        return frozenset().union(*table_sets)

    @property
    def frozen_tables(self) -> frozenset[str]:
        """The tables of written assets whose columns runs may not change."""
        return frozenset(
            rules.table for rules in self.rules.values() if rules.columns_frozen and rules.table is not None
        )


def waive_unwritten_checks(
    rules: Mapping[str, AssetRules], write_set: frozenset[str]
) -> dict[str, AssetRules]:
    """Return the rules of a run's assets; those of assets whose table did not change demand no checks.

    Nothing of such an asset is published: it belongs to another IO manager, or it had no rows to write. If a
    changed table belongs to none of the assets, any of them may have written it, so all keep their checks.
    The other rules stay: an asset may be serializable or exclusive without a table.
    """
    if write_set - {asset_rules.table for asset_rules in rules.values()}:
        return dict(rules)
    return {
        asset: asset_rules
        if asset_rules.table in write_set
        else replace(asset_rules, checks=frozenset(), demands_checks=False)
        for asset, asset_rules in rules.items()
    }


class Decision(StrEnum):
    """The decision of the gate on a run."""

    PASSED = "passed"
    PASSED_WITH_WARNINGS = "passed_with_warnings"
    BLOCKED = "blocked"


@dataclass(frozen=True)
class Verdict:
    """The decision on a run, with its reasons and warnings.

    `checks_passed` counts evaluations that passed; `checks_total` counts all evaluations and the planned
    checks without an evaluation. `failed_tables` are the dotted names of the tables whose rows failed a
    blocking check.
    """

    decision: Decision
    reasons: tuple[CodedReason, ...] = ()
    warnings: tuple[CodedReason, ...] = ()
    checks_passed: int = 0
    checks_total: int = 0
    failed_tables: tuple[str, ...] = ()

    @property
    def blocked(self) -> bool:
        """Whether the run may not be published."""
        return self.decision is Decision.BLOCKED

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the reasons, one for each reason."""
        return tuple(reason.code for reason in self.reasons)

    def format_summary(self) -> str:
        """Format the verdict as one line: decision, check counts, reasons or warnings."""
        details = "; ".join(self.reasons or self.warnings)
        return f"{self.decision} ({self.checks_passed}/{self.checks_total} checks)" + (
            f": {details}" if details else ""
        )


def judge_evidence(evidence: RunEvidence, *, strict_tables: bool) -> Verdict:
    """Judge a run by its evidence, and return the verdict.

    Failed checks of severity WARN become warnings. A run is blocked by each of these:

    - The run did not succeed.
    - A planned check has no evaluation: it crashed or was skipped. A check that was skipped together with its
      asset is not missed.
    - A check of severity ERROR failed.
    - A check ran before the data that it checks was written, or while the code of another step could still
      change its table, or its table changed on the branch after it.
    - A step was repeated in its run, and its last attempt did not materialize again what an earlier one had.
    - A table holds rows of an earlier attempt of a step, which were committed after a later one had begun.
    - A check of a written asset was left out, completely or for a written partition.
    - A written asset requires checks and has none.
    - With `strict_tables`: a changed table, view or function belongs to no materialized asset, so no check
      can cover it.
    - A serializable asset may have read more than is recorded.
    - The columns of a table with frozen columns changed.
    - A step left a change table on the branch.
    """
    if not evidence.succeeded:
        return Verdict(Decision.BLOCKED, (CodedReason("the run did not succeed", "run_failed"),))
    reasons = [
        *_iter_missing(evidence),
        *_iter_failed(evidence),
        *_iter_stale(evidence),
        *_iter_abandoned(evidence),
        *_iter_late_attempts(evidence),
        *_iter_omitted(evidence),
    ]
    reasons += _iter_unknown_reads(evidence)
    reasons += _iter_changed_columns(evidence)
    reasons += _iter_change_tables(evidence)
    if strict_tables:
        reasons += _list_unowned_tables(evidence)
    warnings = tuple(
        _format_failure(evidence, name, partition, result)
        for (name, partition), result in sorted(evidence.evaluations.items(), key=repr)
        if not result.passed and not result.is_blocking
    )
    passed = sum(result.passed for result in evidence.evaluations.values())
    total = len(evidence.evaluations) + len(list(_iter_missing(evidence)))
    if reasons:
        failed = _list_failed_tables(evidence)
        return Verdict(Decision.BLOCKED, tuple(dict.fromkeys(reasons)), warnings, passed, total, failed)
    decision = Decision.PASSED_WITH_WARNINGS if warnings else Decision.PASSED
    return Verdict(decision, (), warnings, passed, total)


def _iter_missing(evidence: RunEvidence) -> Iterator[CodedReason]:
    for name, partition in sorted(evidence.planned_checks, key=repr):
        asset, _ = name
        # A check over all partitions of a run reports once, without a partition.
        is_evaluated = (name, partition) in evidence.evaluations or (name, None) in evidence.evaluations
        is_skipped = (name, partition) in evidence.skipped_checks
        is_needed = asset in evidence.partitions_by_asset or not is_skipped
        if is_needed and not is_evaluated:
            yield CodedReason(
                f"check {_format_check(name, partition)} was planned but never evaluated",
                "check_not_evaluated",
            )


def _iter_failed(evidence: RunEvidence) -> Iterator[CodedReason]:
    for (name, partition), result in sorted(evidence.evaluations.items(), key=repr):
        if not result.passed and result.is_blocking:
            yield _format_failure(evidence, name, partition, result)


def _list_failed_tables(evidence: RunEvidence) -> tuple[str, ...]:
    failing = [
        check for check, result in evidence.evaluations.items() if result.is_blocking and not result.passed
    ]
    assets = {asset for (asset, _), _ in failing} & evidence.rules.keys()
    tables = {evidence.rules[asset].table for asset in assets}
    return tuple(sorted(table for table in tables if table is not None))


def _iter_stale(evidence: RunEvidence) -> Iterator[CodedReason]:
    """Iterate over the checks that do not cover the published state of their table, with the first reason."""
    for rows, result in sorted(evidence.evaluations.items(), key=repr):
        reasons = (
            *_iter_later_writes(evidence, rows, result),
            *_iter_code_writers(evidence, rows, result),
            *_iter_later_changes(evidence, rows, result),
        )
        yield from (CodedReason(why, "check_before_write") for why in reasons[:1])


def _iter_later_writes(evidence: RunEvidence, rows: CheckedRows, result: CheckEvaluation) -> Iterator[str]:
    (asset, _), partition = rows
    # A check without a partition reads all partitions. A materialization without one may change all.
    all_partitions = evidence.partitions_by_asset.get(asset, frozenset())
    partitions = all_partitions if partition is None else {None, partition}
    for written_partition in partitions:
        written = evidence.written_partitions.get((asset, written_partition))
        # Dagster chooses the order of events within a step. A step that was repeated, in its run or by a
        # retry, counts as two steps.
        is_same_step = (
            written is not None
            and written.step_key == result.step_key
            and written.attempt == result.attempt
            and written.position.is_same_run(result.position)
        )
        if written is not None and not is_same_step and written.position > result.position:
            yield f"check {_format_check(*rows)} ran before the last write of {asset}"


def _iter_code_writers(evidence: RunEvidence, rows: CheckedRows, result: CheckEvaluation) -> Iterator[str]:
    """Iterate over the steps whose code may have changed the table of a check after the check had read it.

    A step that ended before the check's step started is no danger, and neither is the code of a step that
    evaluates checks of its own asset.
    """
    start = result.step_start or result.position
    for writer in sorted(evidence.code_writers.get(result.table or "", ()), key=repr):
        is_own_code = writer == result.step and evidence.is_own_step(rows, result)
        if not is_own_code and evidence.find_step_end(writer) > start:
            yield f"check {_format_check(*rows)} ran before step {writer.step_key} had changed {result.table}"


def _iter_later_changes(evidence: RunEvidence, rows: CheckedRows, result: CheckEvaluation) -> Iterator[str]:
    if rows in evidence.later_changes:
        message = evidence.later_changes[rows]
        yield f"{result.table} was changed after check {_format_check(*rows)} had started ({message})"


def _iter_abandoned(evidence: RunEvidence) -> Iterator[CodedReason]:
    """Iterate over the materializations by attempts of steps that were repeated without them.

    The rows that the step's code wrote are removed when a step is repeated, those of the IO manager are not.
    """
    for (asset, partition), written in sorted(evidence.written_partitions.items(), key=repr):
        if written.step_key is None:
            continue
        repetitions = evidence.repeated_steps.get(StepOfRun(written.run_id, written.step_key), 0)
        if written.attempt < repetitions:
            name = asset + (f" [{partition}]" if partition else "")
            yield CodedReason(
                f"asset {name} was materialized by an attempt of step {written.step_key} that failed, and not"
                " again by its last attempt",
                "attempt_abandoned",
            )


def _iter_late_attempts(evidence: RunEvidence) -> Iterator[CodedReason]:
    for table, step in sorted(evidence.late_attempts.items()):
        yield CodedReason(
            f"{table} has rows of an earlier attempt of step {step}, which were committed after its last"
            " attempt had begun",
            "attempt_late",
        )


def _iter_omitted(evidence: RunEvidence) -> Iterator[CodedReason]:
    reported_checks = evidence.planned_checks | evidence.evaluations.keys()
    names = {name for name, _ in reported_checks}
    for asset, rules in sorted(evidence.rules.items()):
        partitions = sorted(evidence.partitions_by_asset.get(asset, ()), key=repr)
        for check in sorted(rules.checks):
            name = (asset, check)
            if name not in names:
                yield CodedReason(
                    f"check {_format_check(name, None)} was left out of the run", "check_left_out"
                )
            elif (name, None) not in reported_checks:
                for partition in partitions:
                    if partition is not None and (name, partition) not in reported_checks:
                        why = f"check {_format_check(name, partition)} was left out of the run"
                        yield CodedReason(why, "check_left_out")
        if rules.demands_checks and not rules.checks and not any(name[0] == asset for name in names):
            yield CodedReason(
                f"asset {asset} has no check (add one, or allow it with"
                " table_metadata(require_checks=False))",
                "no_check",
            )


def _iter_unknown_reads(evidence: RunEvidence) -> Iterator[CodedReason]:
    if evidence.serializable_assets and evidence.unnamed_reads:
        yield CodedReason(
            f"{format_names('serializable asset', sorted(evidence.serializable_assets))} may have read more"
            " than is recorded:"
            f" {', '.join(sorted(evidence.unnamed_reads))}",
            "reads_unknown",
        )


def _iter_changed_columns(evidence: RunEvidence) -> Iterator[CodedReason]:
    for table, columns in sorted(evidence.changed_columns.items()):
        yield CodedReason(
            f"the run changed frozen columns of {table}: {', '.join(columns)} (leave them as they are, or"
            ' declare table_metadata(columns="evolve"))',
            "frozen_columns",
        )


def _iter_change_tables(evidence: RunEvidence) -> Iterator[CodedReason]:
    for table in sorted(evidence.write_set):
        if CHANGE_TABLE_INFIX in table:
            why = f"the change table {table} is still on the branch: the step that created it did not finish"
            yield CodedReason(why, "change_table_left")


def _list_unowned_tables(evidence: RunEvidence) -> list[CodedReason]:
    asset_tables = {rules.table for rules in evidence.rules.values()}
    return [
        CodedReason(
            f"{table} (a table, view or function) was changed, but belongs to no materialized asset",
            "table_of_no_asset",
        )
        for table in sorted(evidence.write_set - asset_tables)
    ]


def _format_failure(
    evidence: RunEvidence, name: CheckName, partition: str | None, result: CheckEvaluation
) -> CodedReason:
    # Descriptions end with a period; reasons are joined into one sentence.
    description = f": {result.description.rstrip('.')}" if result.description else ""
    return CodedReason(
        f"check {_format_check(name, partition)} failed{description}{_format_scope(evidence, name)}",
        "check_failed",
    )


def _format_scope(evidence: RunEvidence, name: CheckName) -> str:
    """Return a note for a check on a whole partitioned table, else an empty text.

    The failing rows of such a check may be older than the run.
    """
    asset, check = name
    is_partitioned = bool(evidence.partitions_by_asset.get(asset, frozenset()) - {None})
    if (
        not is_partitioned
        or asset not in evidence.rules
        or check not in evidence.rules[asset].whole_table_checks
    ):
        return ""
    return " (the check reads all partitions, also those that this run did not write)"


def _format_check(name: CheckName, partition: str | None) -> str:
    return f"{name[1]} on {name[0]}" + (f" [{partition}]" if partition else "")


LAUNCH_AGAIN = "Launch it again: the new run starts from the current main."
"""Advice for a run that passed its checks but met a change of the same rows on `main`."""


def format_rows_hint(tables: Sequence[str], run_id: str) -> str:
    """Format a sentence with the commands that show the rows which failed a check; empty without `tables`.

    `tables` are dotted names. The commands find the run's rows on its branch, and later on the tag of the
    discarded branch.
    """
    commands = [
        f"branchlake sql {shlex.quote(f'FROM {sql_name(ContentKey.from_path(table))}')} --run {run_id[:8]}"
        for table in tables
    ]
    return f"Look at the rows: {', '.join(commands)}." if commands else ""
