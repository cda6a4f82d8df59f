"""The quality gate: derive a verdict from evidence, and block if evidence is missing. Pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from branchlake_dagster.lakehouse.lakehouse import sql_name
from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster.publication.evidence import CheckEvaluation, CheckName, RunEvidence
from branchlake_dagster.stored_names import CHANGE_TABLE_INFIX
from branchlake_dagster.wording import CodedReason, format_names


class Decision(StrEnum):
    """The decision of the gate on a run."""

    PASSED = "passed"
    PASSED_WITH_WARNINGS = "passed_with_warnings"
    BLOCKED = "blocked"


@dataclass(frozen=True)
class Verdict:
    """The decision on a run, its reasons and warnings, and how many of the evaluated checks passed.

    `failed_tables` are the dotted names of the tables whose rows failed a blocking check.
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
    """Judge a run by its evidence.

    A run is blocked by each of these:

    - The run did not succeed.
    - A planned check has no evaluation: it crashed or was skipped.
    - A check of severity ERROR failed.
    - A check ran before the data that it checks was written.
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
        # A check over all partitions of a run reports once, without a partition.
        if (name, partition) not in evidence.evaluations and (name, None) not in evidence.evaluations:
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
    return tuple(sorted({evidence.rules[asset].table for asset in assets}))


def _iter_stale(evidence: RunEvidence) -> Iterator[CodedReason]:
    for (name, partition), result in sorted(evidence.evaluations.items(), key=repr):
        for (asset, written_partition), written in evidence.written_partitions.items():
            is_same_data = asset == name[0] and (partition is None or written_partition in (None, partition))
            # Dagster chooses the order of events within a step. A step that a retry ran again counts as two
            # steps.
            is_same_step = written.step_key == result.step_key and written.position.is_same_run(
                result.position
            )
            if is_same_data and not is_same_step and written.position > result.position:
                why = f"check {_format_check(name, partition)} ran before the last write of {asset}"
                yield CodedReason(why, "check_before_write")


def _iter_omitted(evidence: RunEvidence) -> Iterator[CodedReason]:
    reported_checks = evidence.planned_checks | evidence.evaluations.keys()
    names = {name for name, _ in reported_checks}
    for asset, rules in sorted(evidence.rules.items()):
        partitions = sorted(
            {
                partition_key
                for written_asset, partition_key in evidence.written_partitions
                if written_asset == asset
            },
            key=repr,
        )
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
        if rules.demands_checks and not any(name[0] == asset for name in names):
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
    """Return a note for checks on a whole partitioned table: the failing rows may be older than the run."""
    asset, check = name
    partitioned = any(written == asset and part is not None for written, part in evidence.written_partitions)
    if (
        not partitioned
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
    """Format the commands that show the rows which failed a check; empty if `tables` is empty.

    `tables` are dotted names. The commands find the run's rows on its branch, and later on the tag of the
    discarded branch.
    """
    commands = [
        f"branchlake sql {shlex.quote(f'FROM {sql_name(ContentKey.from_path(table))}')} --run {run_id[:8]}"
        for table in tables
    ]
    return f"Look at the rows: {', '.join(commands)}." if commands else ""
