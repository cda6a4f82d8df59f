"""Showing a publication, or why there is none, where people look: the run and the asset in Dagster's UI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dagster import AssetKey, AssetObservation, DagsterInstance, DagsterRun, MetadataValue
from dagster._core.events import EngineEventData

from branchlake_dagster.branching.run_tags import PUBLICATION_TAG, REASON_TAG, VERDICT_TAG
from branchlake_dagster.publication.evidence import RunEvidence
from branchlake_dagster.publication.gate import Verdict

_TAG_LENGTH = 250
_ROWS_SHOWN = 200


def announce(
    instance: DagsterInstance,
    run: DagsterRun,
    evidence: RunEvidence,
    verdict: Verdict,
    *,
    branch: str,
    publication: str | None,
    why: str | None = None,
    took_s: float,
) -> None:
    """Tell the run's log, its tags and each written asset. Doing it twice tells it once.

    `publication` is the commit on `main`; without one, `why` or the verdict's reasons tell the cause. The
    tags come last: they mark that the rest was told. `took_s`: seconds from evidence to publication.
    """
    tags = _tags(verdict, publication, why)
    current = instance.get_run_by_id(run.run_id)
    if current is not None and tags.items() <= current.tags.items():
        return
    text = f"Published as {publication}." if publication else f"Not published: {_sentence(why, verdict)}"
    metadata = _metadata(run, verdict, branch, publication, why)
    metadata["branchlake/publisher_s"] = MetadataValue.float(round(took_s, 4))
    for (asset, partition), written in list(evidence.written.items())[:_ROWS_SHOWN]:
        rows = {"branchlake/rows": MetadataValue.int(written.rows)} if written.rows is not None else {}
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


def _sentence(why: str | None, verdict: Verdict) -> str:
    return f"{(why or verdict.summary()).rstrip('.')}."


def _tags(verdict: Verdict, publication: str | None, why: str | None) -> Mapping[str, str]:
    tags = {VERDICT_TAG: str(verdict.decision)}
    if publication:
        tags[PUBLICATION_TAG] = publication
    reason = why or "; ".join(verdict.reasons)
    if reason and not publication:
        tags[REASON_TAG] = reason if len(reason) <= _TAG_LENGTH else f"{reason[: _TAG_LENGTH - 1]}…"
    return tags


def _metadata(
    run: DagsterRun, verdict: Verdict, branch: str, publication: str | None, why: str | None
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "branchlake/verdict": MetadataValue.text(str(verdict.decision)),
        "branchlake/checks": MetadataValue.text(f"{verdict.checks_passed}/{verdict.checks_total} passed"),
        "branchlake/branch": MetadataValue.text(branch),
        "branchlake/run": MetadataValue.dagster_run(run.run_id),
    }
    if publication:
        found["branchlake/publication"] = MetadataValue.text(publication)
    listed = [why] if why else [*verdict.reasons, *(f"warning: {text}" for text in verdict.warnings)]
    if listed:
        found["branchlake/reasons"] = MetadataValue.md("\n".join(f"- {line}" for line in listed))
    return found
