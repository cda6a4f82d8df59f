"""Showing a publication, or why there is none, where people look: the run and the asset in Dagster's UI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from dagster import AssetKey, AssetObservation, DagsterInstance, DagsterRun, MetadataValue
from dagster._core.events import EngineEventData

from branchlake_dagster.branching.run_tags import PUBLICATION_TAG, REASON_TAG, VERDICT_TAG
from branchlake_dagster.publication.evidence import RunEvidence
from branchlake_dagster.publication.gate import Verdict

_TAG_LENGTH = 250
_EXAMPLES = 200
_ROWS = {True: "dagster/row_count", False: "dagster/partition_row_count"}
"""Dagster's own names, by whether the whole asset was written."""


def announce(
    instance: DagsterInstance,
    run: DagsterRun,
    evidence: RunEvidence,
    verdict: Verdict,
    *,
    branch: str,
    publication: str | None,
    rebased: Sequence[str] = (),
    why: str | None = None,
    text: str | None = None,
    kept_hours: float = 0.0,
    took_s: float,
) -> None:
    """Tell the run's log, its tags and each written asset. Doing it twice tells it once.

    `publication` is the commit on `main`, `rebased` the tables whose changes were replayed for it. Without
    one, `why` or the verdict's reasons tell the cause, and for `kept_hours` the branch stays for debugging;
    `text` replaces the sentence that is made of all that.
    The tags come last: they mark that the rest was told. `took_s`: seconds from evidence to publication.
    """
    tags = _tags(verdict, publication, why)
    current = instance.get_run_by_id(run.run_id)
    if current is not None and tags.items() <= current.tags.items():
        return
    text = text or _text(verdict, branch, publication, rebased, why, kept_hours)
    metadata = _metadata(run, evidence, verdict, branch, publication, rebased, why)
    metadata["branchlake/publisher_s"] = MetadataValue.float(round(took_s, 4))
    # Automation follows what is told here, so every published partition is; of the others, examples do.
    shown = None if publication else _EXAMPLES
    for (asset, partition), written in islice(evidence.written.items(), shown):
        rows = {_ROWS[partition is None]: MetadataValue.int(written.rows)} if written.rows is not None else {}
        instance.report_runless_asset_event(
            AssetObservation(
                asset_key=AssetKey.from_user_string(asset),
                partition=partition,
                description=text,
                metadata={**metadata, **rows},
            )
        )
    instance.report_engine_event(text, run, EngineEventData(metadata=metadata))
    instance.add_run_tags(run.run_id, dict(tags))


def _text(
    verdict: Verdict,
    branch: str,
    publication: str | None,
    rebased: Sequence[str],
    why: str | None,
    kept_hours: float,
) -> str:
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
        tags[REASON_TAG] = reason if len(reason) <= _TAG_LENGTH else f"{reason[: _TAG_LENGTH - 1]}…"
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
