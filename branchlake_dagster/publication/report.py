"""Showing a publication, or why there is none, on the run and the assets in Dagster's UI."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from cachetools import LRUCache, cachedmethod
from cachetools.keys import hashkey
from dagster import AssetKey, AssetObservation, DagsterInstance, DagsterRun, MetadataValue, RunsFilter
from pyiceberg.exceptions import NoSuchTableError

from branchlake_dagster.internals.dagster import report_engine_event, report_observations
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.lakehouse.web_page import commit_page
from branchlake_dagster.nessie.model import ContentKey
from branchlake_dagster.publication.evidence import RunEvidence, Written
from branchlake_dagster.publication.verdict import Verdict
from branchlake_dagster.runs.discarding import take_back
from branchlake_dagster.runs.provenance import row_count
from branchlake_dagster.runs.run_tags import NONE, Status, opened_by, shortened
from branchlake_dagster.stored_names import EventMetadata, RunTag

_log = logging.getLogger(__name__)
_REMEMBERED = 200


class MainView:
    """Looks into the lake. A commit never changes, so what was counted at one is remembered."""

    def __init__(self, lake: Lakehouse) -> None:
        self._lake = lake
        self._counted: LRUCache[tuple[object, ...], int | None] = LRUCache(_REMEMBERED)

    def rows(self, tables: Collection[str], commit: str | None) -> Mapping[str, int | None]:
        """The rows of each table on `main` at `commit` (None: now), by dotted name.

        0 of a table that is not there, None where it cannot be told from metadata.
        """
        count = self._count if commit is None else partial(self._remembered, commit=commit)
        return {table: count(table) for table in tables}

    def page(self, commit: str) -> str | None:
        """The address of a commit's web page; None where there is none that a browser could open."""
        return commit_page(self._lake.endpoints(spark=False), self._lake.settings, commit)

    @cachedmethod(lambda self: self._counted, key=lambda _, table, commit: hashkey(table, commit))
    def _remembered(self, table: str, commit: str) -> int | None:
        return self._count(table, commit)

    def _count(self, table: str, commit: str | None = None) -> int | None:
        catalog = self._lake.catalog(f"{MAIN}@{commit}" if commit else MAIN)
        try:
            return row_count(catalog.load_table(ContentKey.from_path(table).elements))
        except NoSuchTableError:
            return 0
        except Exception as error:  # noqa: BLE001 - what became of the run is told without it
            _log.warning("The rows of %s on main could not be counted: %s", table, error)
            return None


_EXAMPLES = 200
_AT_ONCE = 100
_UNJUDGED = (Status.FAILED, Status.CANCELED, Status.INTERRUPTED)
"""Runs that have not come to the gate."""
"""Partitions that are told together: with SQLite in 0.03 s."""


@dataclass(frozen=True)
class RunReport:
    """What is told of one run.

    `publication` is the commit on `main`, `by_hand` when somebody else made it, `rebased` the tables whose
    changes were replayed for it. Without one, `why` or the verdict's reasons tell the cause, and for
    `kept_hours` the branch stays for debugging; `text` replaces the sentence that is made of all that.
    `on_main` says that its rows are there all the same, merged by hand or written directly. `next_step` is
    what to do about it, as a sentence.
    `took_s`: seconds from the look at its branch to publication; `at` is the time now, a POSIX time stamp.
    """

    run: DagsterRun
    evidence: RunEvidence
    verdict: Verdict
    branch: str
    status: Status
    took_s: float
    at: float
    publication: str | None = None
    by_hand: bool = False
    rebased: tuple[str, ...] = ()
    why: str | None = None
    text: str | None = None
    kept_hours: float = 0.0
    on_main: bool = False
    next_step: str = ""

    @property
    def taken_back(self) -> bool:
        """Whether it materialised what `main` does not have."""
        held = self.status in (Status.PUBLISHED, Status.UNCHANGED)
        return not (held or self.publication or self.on_main)

    def sentence(self) -> str:
        """What became of the run."""
        if self.text:
            return self.text
        if self.publication and self.by_hand:
            return f"On main already: somebody merged its branch by hand, as {self.publication}."
        if self.publication:
            was = "was" if len(self.rebased) == 1 else "were"
            again = f" {_listed(self.rebased)} {was} rebased on what main had become." if self.rebased else ""
            return f"Published as {self.publication}.{again}"
        kept = f" Its branch {self.branch} is kept for {self.kept_hours:g} h." if self.kept_hours else ""
        advice = f" {self.next_step}" if self.next_step else ""
        return f"Not published: {self.reason().rstrip('.')}.{kept}{advice}"

    def reason(self) -> str:
        """Why it is not published, without the counts of its checks."""
        return self.why or "; ".join(self.verdict.reasons) or self.verdict.summary()

    def shown_verdict(self) -> str:
        """The gate's decision; the run's own word if the gate has not decided why it is not published."""
        refused = self.status is Status.REFUSED and not self.verdict.blocked
        own_word = refused or self.status in _UNJUDGED
        return str(self.status if own_word else self.verdict.decision)

    def tags(self) -> Mapping[str, str]:
        """The run's tags."""
        tags = {RunTag.STATUS: str(self.status), RunTag.VERDICT: self.shown_verdict()}
        if self.publication:
            return {**tags, RunTag.PUBLICATION: self.publication}
        reason = self.why or "; ".join(self.verdict.reasons)
        return {**tags, RunTag.REASON: shortened(reason)} if reason else tags


def report_outcome(
    instance: DagsterInstance,
    report: RunReport,
    view: MainView | None,
    *,
    more: Callable[[], bool] = lambda: True,
) -> int:
    """Tell the run's log, its tags and each written asset; how many partitions are left to be told.

    Doing it twice tells it once. It stops when there is no time for `more`, notes in a tag how far it came,
    and goes on from there when it is called again. The other tags come last: they mark that all was told.
    """
    tags, run_id = report.tags(), report.run.run_id
    # Not `get_run_by_id`, which looks at the table's columns besides.
    current = next(iter(instance.get_runs(RunsFilter(run_ids=[run_id]))), None)
    now = current.tags if current is not None else {}
    if current is not None and tags.items() <= now.items():
        return 0
    # Automation follows what is told here, so every published partition is; of the others, examples do.
    shown = list(islice(report.evidence.written.items(), None if report.publication else _EXAMPLES))
    reported = _reported(now, run_id)
    common = _metadata(report, view)
    tables = {_table(report, asset) for (asset, _), _ in shown}
    rows = _rows(report, tables, view)
    if report.taken_back:
        take_back(instance, report.run, {one.run_id for one in report.evidence.written.values()})
    text = report.sentence()

    def observed(asset: str, partition: str | None, written: Written) -> AssetObservation:
        found = _of_asset(report, asset, partition, written, rows[_table(report, asset)])
        key = AssetKey.from_user_string(asset)
        return AssetObservation(key, partition=partition, description=text, metadata={**common, **found})

    for number in range(reported, len(shown), _AT_ONCE):
        if number > reported and not more():
            instance.add_run_tags(run_id, {RunTag.REPORTED: str(number)})
            return len(shown) - number
        part = shown[number : number + _AT_ONCE]
        report_observations(instance, [observed(*of, written) for of, written in part])
    report_engine_event(instance, text, report.run, common)
    # What an attempt that broke has left there is true no more, and Dagster has no way to remove a tag.
    passed = {name: NONE for name in (RunTag.REASON, RunTag.NEXT_ATTEMPT) if now.get(name, NONE) != NONE}
    instance.add_run_tags(run_id, {**passed, **tags})
    return 0


def _table(report: RunReport, asset: str) -> str:
    return report.evidence.rules[asset].table


def _rows(report: RunReport, tables: Collection[str], view: MainView | None) -> Mapping[str, int | None]:
    """The rows of each table on `main`: what the run has counted, where its branch became `main`'s."""
    known: dict[str, int | None] = {}
    if report.publication and not report.by_hand and not report.on_main:
        for (asset, _), written in sorted(report.evidence.written.items(), key=lambda entry: entry[1].at):
            table = _table(report, asset)
            if table not in report.rebased and written.rows is not None:
                known[table] = written.rows
    rest = [table for table in tables if table not in known]
    return {**(view.rows(rest, report.publication) if view else dict.fromkeys(rest)), **known}


def _reported(tags: Mapping[str, str], run_id: str) -> int:
    """How many partitions an earlier call has told."""
    count = tags.get(RunTag.REPORTED, "") if opened_by(tags, run_id) else ""
    return int(count) if count.isdigit() else 0


def _metadata(report: RunReport, view: MainView | None) -> dict[str, Any]:
    """What is told of the run, on each of its assets and in its own log."""
    verdict = report.verdict
    found: dict[str, Any] = {
        EventMetadata.ON_MAIN: MetadataValue.bool(not report.taken_back),
        EventMetadata.VERDICT: MetadataValue.text(report.shown_verdict()),
        EventMetadata.CHECKS: MetadataValue.text(f"{verdict.checks_passed}/{verdict.checks_total} passed"),
        EventMetadata.BRANCH: MetadataValue.text(report.branch),
        EventMetadata.RUN: MetadataValue.dagster_run(report.run.run_id),
        EventMetadata.PUBLISHER_S: MetadataValue.float(round(report.took_s, 4)),
    }
    if report.publication:
        found[EventMetadata.PUBLICATION] = MetadataValue.text(report.publication)
        found[EventMetadata.TABLES] = MetadataValue.text(", ".join(sorted(report.evidence.write_set)))
        if view and (page := view.page(report.publication)):
            found[EventMetadata.COMMIT_PAGE] = MetadataValue.url(page)
    if report.rebased:
        found[EventMetadata.REBASED] = MetadataValue.text(", ".join(report.rebased))
    warnings = [f"warning: {text}" for text in verdict.warnings]
    if listed := [report.why] if report.why else [*verdict.reasons, *warnings]:
        found[EventMetadata.REASONS] = MetadataValue.md("\n".join(f"- {line}" for line in listed))
    return found


def _of_asset(
    report: RunReport, asset: str, partition: str | None, written: Written, rows: int | None
) -> dict[str, Any]:
    """What is told of one partition of one asset: above all, what `main` has of it now."""
    found: dict[str, Any] = {}
    if rows is not None:
        found[EventMetadata.TABLE_ROWS] = MetadataValue.int(rows)
    alone = written.whole or _table(report, asset) not in report.rebased
    if report.publication and alone and written.partition_rows is not None:
        found[EventMetadata.PARTITION_ROWS] = MetadataValue.int(written.partition_rows)
    if report.publication and written.at:
        found[EventMetadata.PUBLICATION_DELAY_S] = MetadataValue.float(
            round(max(0.0, report.at - written.at), 3)
        )
    if report.publication and written.preview:
        found[EventMetadata.PREVIEW] = MetadataValue.md(written.preview)
    counted = [
        one.failing
        for ((checked, _), part), one in report.evidence.evaluations.items()
        if checked == asset and part in (partition, None) and one.failing is not None
    ]
    if counted:
        found[EventMetadata.FAILING_ROWS] = MetadataValue.int(sum(counted))
    return found


def _listed(texts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
