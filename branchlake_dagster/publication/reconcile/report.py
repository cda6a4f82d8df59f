"""Showing a publication, or why there is none, where people look: the run and the asset in Dagster's UI."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from dagster import AssetKey, AssetObservation, DagsterInstance, DagsterRun, MetadataValue

from branchlake_dagster.branching.branch.run_tags import (
    NEXT_ATTEMPT_TAG,
    NONE,
    PUBLICATION_TAG,
    REASON_TAG,
    REPORTED_TAG,
    VERDICT_TAG,
    opened_by,
    shortened,
)
from branchlake_dagster.library_internals.dagster import report_engine_event
from branchlake_dagster.publication.gate.evidence import RunEvidence
from branchlake_dagster.publication.gate.verdict import Verdict

_EXAMPLES = 200
_ROWS = {True: "dagster/row_count", False: "dagster/partition_row_count"}
"""Dagster's own names, by whether the whole asset was written."""


def report_outcome(
    instance: DagsterInstance,
    run: DagsterRun,
    evidence: RunEvidence,
    verdict: Verdict,
    *,
    branch: str,
    publication: str | None,
    by_hand: bool = False,
    rebased: Sequence[str] = (),
    why: str | None = None,
    text: str | None = None,
    kept_hours: float = 0.0,
    took_s: float,
    more: Callable[[], bool] = lambda: True,
) -> int:
    """Tell the run's log, its tags and each written asset; how many partitions are left to be told.

    Doing it twice tells it once. It stops when there is no time for `more`, notes in a tag how far it came,
    and goes on from there when it is called again. The other tags come last: they mark that all was told.
    `publication` is the commit on `main`, `by_hand` when somebody else made it, `rebased` the tables whose
    changes were replayed for it. Without one, `why` or the verdict's reasons tell the cause, and for
    `kept_hours` the branch stays for debugging; `text` replaces the sentence that is made of all that.
    `took_s`: seconds from evidence to publication.
    """
    tags = _tags(verdict, publication, why)
    current = instance.get_run_by_id(run.run_id)
    now = current.tags if current is not None else {}
    if current is not None and tags.items() <= now.items():
        return 0
    text = text or _text(verdict, branch, publication, by_hand, rebased, why, kept_hours)
    metadata = _metadata(run, evidence, verdict, branch, publication, rebased, why)
    metadata["branchlake/publisher_s"] = MetadataValue.float(round(took_s, 4))
    # Automation follows what is told here, so every published partition is; of the others, examples do.
    shown = list(islice(evidence.written.items(), None if publication else _EXAMPLES))
    told = _told(now, run.run_id)
    for number, ((asset, partition), written) in enumerate(shown[told:], start=told):
        if number > told and not more():
            instance.add_run_tags(run.run_id, {REPORTED_TAG: str(number)})
            return len(shown) - number
        rows = {_ROWS[partition is None]: MetadataValue.int(written.rows)} if written.rows is not None else {}
        instance.report_runless_asset_event(
            AssetObservation(
                asset_key=AssetKey.from_user_string(asset),
                partition=partition,
                description=text,
                metadata={**metadata, **rows},
            )
        )
    report_engine_event(instance, text, run, metadata)
    # What an attempt that broke has left there is true no more, and Dagster has no way to remove a tag.
    passed = {name: NONE for name in (REASON_TAG, NEXT_ATTEMPT_TAG) if now.get(name, NONE) != NONE}
    instance.add_run_tags(run.run_id, {**passed, **tags})
    return 0


def _told(tags: Mapping[str, str], run_id: str) -> int:
    """How many partitions an earlier call has told."""
    count = tags.get(REPORTED_TAG, "") if opened_by(tags, run_id) else ""
    return int(count) if count.isdigit() else 0


def _text(
    verdict: Verdict,
    branch: str,
    publication: str | None,
    by_hand: bool,
    rebased: Sequence[str],
    why: str | None,
    kept_hours: float,
) -> str:
    if publication and by_hand:
        return f"On main already: somebody merged its branch by hand, as {publication}."
    if publication:
        again = f" {', '.join(rebased)} was rebased on what main had become." if rebased else ""
        return f"Published as {publication}.{again}"
    kept = f" Its branch {branch} is kept for {kept_hours:g} h." if kept_hours else ""
    return f"Not published: {(why or verdict.summary()).rstrip('.')}.{kept}"


def _tags(verdict: Verdict, publication: str | None, why: str | None) -> Mapping[str, str]:
    tags = {VERDICT_TAG: str(verdict.decision)}
    if publication:
        tags[PUBLICATION_TAG] = publication
    reason = why or "; ".join(verdict.reasons)
    if reason and not publication:
        tags[REASON_TAG] = shortened(reason)
    return tags


def _metadata(
    run: DagsterRun,
    evidence: RunEvidence,
    verdict: Verdict,
    branch: str,
    publication: str | None,
    rebased: Sequence[str],
    why: str | None,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "branchlake/verdict": MetadataValue.text(str(verdict.decision)),
        "branchlake/checks": MetadataValue.text(f"{verdict.checks_passed}/{verdict.checks_total} passed"),
        "branchlake/branch": MetadataValue.text(branch),
        "branchlake/run": MetadataValue.dagster_run(run.run_id),
    }
    if publication:
        found["branchlake/publication"] = MetadataValue.text(publication)
        found["branchlake/tables"] = MetadataValue.text(", ".join(sorted(evidence.write_set)))
    if rebased:
        found["branchlake/rebased"] = MetadataValue.text(", ".join(rebased))
    listed = [why] if why else [*verdict.reasons, *(f"warning: {text}" for text in verdict.warnings)]
    if listed:
        found["branchlake/reasons"] = MetadataValue.md("\n".join(f"- {line}" for line in listed))
    return found
