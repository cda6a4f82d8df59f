"""Finds rows that an attempt of a step committed although a later attempt had taken its place.

An attempt can end while its commit is still on the way: the process of a step is killed, and the Spark server
completes the query. Such a commit adds rows a second time, or replaces those of the later attempt. It names
the run, so it is not a commit of another writer. The writes of the IO manager and those by SQL in the run's
Spark session name their attempt. Not found are Spark's commits without rows, such as a delete of whole files,
and commits through the catalog, which end with the process of the attempt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pyiceberg.table.metadata import TableMetadata

from branchlake_dagster.history.capture import ancestors_after
from branchlake_dagster.nessie.model import Content, ContentKey, IcebergTable
from branchlake_dagster.publication.verdict import RunEvidence
from branchlake_dagster.runs.branch_commits import ReadMetadata
from branchlake_dagster.runs.run_events import StepOfRun
from branchlake_dagster.stored_names import LakeProperty

_Attempt = tuple[int, int]
"""An attempt of a step: the index of its run on the branch, and its number in the run, from 1."""
_ADDING = ("append", "upsert")
"""Write modes that do not replace the rows which an earlier attempt of the step has committed."""


def find_late_attempts(
    evidence: RunEvidence, contents: Mapping[ContentKey, Content | None], read_metadata: ReadMetadata
) -> dict[str, str]:
    """Return the step whose earlier attempt committed late, by the dotted name of the table.

    `contents` are the changed keys of the branch with their present contents.

    Cost: one metadata file per changed table if a step was attempted again, else none.
    """
    if not evidence.repeated_steps:
        return {}
    late_steps: dict[str, str] = {}
    for key, content in contents.items():
        metadata = read_metadata(content.metadata_location) if isinstance(content, IcebergTable) else None
        if metadata is None:  # the publisher reports the missing file
            continue
        summaries = _active_summaries(metadata, evidence.run_ids)
        for step in (*_iter_late_steps(evidence, summaries), *_iter_late_code(evidence, summaries)):
            late_steps.setdefault(key.name, step)
    return late_steps


def _active_summaries(metadata: TableMetadata, run_ids: Sequence[str]) -> list[Mapping[str, str]]:
    """Return the summaries of the runs' snapshots that count for the table's rows, newest first.

    Snapshots that were rolled back, or whose rows a later attempt has removed, are left out.
    """
    ancestors, _ = ancestors_after(metadata)
    summaries = {
        str(snapshot.snapshot_id): snapshot.summary.additional_properties
        for snapshot in reversed(ancestors)
        if snapshot.summary is not None
        and snapshot.summary.additional_properties.get(LakeProperty.RUN_ID) in run_ids
    }
    removed = {
        snapshot_id
        for summary in summaries.values()
        for snapshot_id in summary.get(LakeProperty.UNDOES, "").split(",")
    }
    return [
        summary
        for snapshot_id, summary in summaries.items()
        if LakeProperty.UNDOES not in summary and snapshot_id not in removed
    ]


def _iter_late_steps(evidence: RunEvidence, newest_first: Sequence[Mapping[str, str]]) -> Iterator[str]:
    replaced_outputs: set[tuple[str, str]] = set()
    last_attempts: dict[tuple[str, str], _Attempt | None] = {}
    for summary in newest_first:
        number = summary.get(LakeProperty.ATTEMPT, "")
        if not number.isdigit():
            continue
        run_id = summary[LakeProperty.RUN_ID]
        attempt = (evidence.run_ids.index(run_id), int(number))
        step = summary.get(LakeProperty.STEP)
        if step is None:  # not a write of the IO manager
            continue
        asset = summary.get(LakeProperty.ASSET, "")
        if (step, asset) in replaced_outputs:
            continue
        if summary.get(LakeProperty.WRITE_MODE) not in _ADDING:
            replaced_outputs.add((step, asset))
        if (step, asset) not in last_attempts:
            last_attempts[step, asset] = _find_materializing_attempt(evidence, step, asset)
        last_attempt = last_attempts[step, asset]
        if last_attempt is not None and attempt < last_attempt:
            yield step


def _iter_late_code(evidence: RunEvidence, summaries: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Iterate over the steps whose own code wrote by SQL in an attempt that was not the last one of its run.

    When a step is attempted again, its tables are restored to their state before its first attempt. So none
    of their present snapshots is of an earlier attempt, unless its commit was late.
    """
    for summary in summaries:
        step, number = summary.get(LakeProperty.CODE_OF_STEP), summary.get(LakeProperty.CODE_ATTEMPT, "")
        if step is None or not number.isdigit() or LakeProperty.STEP in summary:
            continue
        repetitions = evidence.repeated_steps.get(StepOfRun(summary[LakeProperty.RUN_ID], step), 0)
        if int(number) <= repetitions:
            yield step


def _find_materializing_attempt(evidence: RunEvidence, step: str, asset: str) -> _Attempt | None:
    """Return the last attempt of a step that materialized an asset; None if none did."""
    attempts = [
        (evidence.run_ids.index(written.run_id), written.attempt + 1)
        for partition in evidence.partitions_by_asset.get(asset, ())
        if (written := evidence.written_partitions[asset, partition]).step_key == step
    ]
    return max(attempts, default=None)
