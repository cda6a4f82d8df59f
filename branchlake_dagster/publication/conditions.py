"""Automation that follows publication: an upstream counts as updated when `main` has it, not before.

Dagster's own conditions (`eager()`, `any_deps_updated()`) follow materialisations, and a run materialises on
its branch, where nobody else sees it. These follow what the publisher tells each asset after the merge. They
are classes of this package, which Dagster's daemon does not load, so only a sensor that evaluates in the
code server sees them: `publication_automation_sensor()`.

What the publisher told an asset in Dagster's event log, read in steps: each publication once.

The publisher reports an observation per published partition. Two things make "everything after the last
id" the wrong question. A database may commit an event after another one with a higher id. And a publisher
that died between telling and noting that it told, or two publishers in a race, tell the same publication
twice. So each step reads a little of the past again and knows by name what it has passed on already.
"""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

from dagster import (
    AssetKey,
    AssetOrCheckKey,
    AssetRecordsFilter,
    AssetSelection,
    AutomationCondition,
    AutomationConditionSensorDefinition,
    AutomationContext,
    AutomationResult,
    BetaWarning,
    DagsterInstance,
    DefaultSensorStatus,
    RepositoryDefinition,
    RunsFilter,
)

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.dagster import (
    AndAutomationCondition,
    AssetKeyPartitionKey,
    CoercibleToAssetSelection,
    EntitySubset,
    TimingMetadata,
)
from branchlake_dagster.publication.written_partitions import load_asset_partitions, load_run_partitions
from branchlake_dagster.runs.run_tags import PENDING
from branchlake_dagster.stored_names import EventMetadata, RunTag

REREAD_EVENT_IDS = 1_000
"""How many event ids are read again: more than Dagster stores while one insert is under way."""

_PAGE = 1_000

PublicationKey = tuple[str, str | None]
"""(branch and commit on `main`, partition): the same however often it is told."""


@dataclass(frozen=True)
class PublicationReport:
    """One observation of a publication: its place in the event log, and what was published as what."""

    storage_id: int
    branch: str
    commit: str
    partition: str | None

    @property
    def key(self) -> PublicationKey:
        """What makes it the same as another telling."""
        return f"{self.branch}@{self.commit}", self.partition


def iter_publication_reports(
    instance: DagsterInstance, key: AssetKey, *, after_id: int, last_id: int
) -> Iterator[PublicationReport]:
    """The publications told to `key` with `after_id` < storage id <= `last_id`, in that order.

    What was told of blocked, refused and discarded runs has no publication and is left out, as are
    observations of others.
    """
    records_filter = AssetRecordsFilter(
        asset_key=key, after_storage_id=max(after_id, 0), before_storage_id=last_id + 1
    )
    cursor: str | None = None
    while True:
        page = instance.fetch_observations(records_filter, limit=_PAGE, cursor=cursor, ascending=True)
        for record in page.records:
            observation = record.asset_observation
            if observation is None:
                continue
            commit, branch = (
                observation.metadata.get(EventMetadata.PUBLICATION),
                observation.metadata.get(EventMetadata.BRANCH),
            )
            if commit is not None and branch is not None:
                yield PublicationReport(
                    record.storage_id, str(branch.value), str(commit.value), observation.partition
                )
        if not page.has_more:
            return
        cursor = page.cursor


@dataclass(frozen=True)
class ReportCursor:
    """How far an asset was read: up to this id, and the names passed on from the last `REREAD_EVENT_IDS` ids."""

    last_id: int
    delivered_keys: frozenset[PublicationKey] = field(default_factory=frozenset)

    def to_json(self) -> str:
        """A cursor for Dagster to keep."""
        partitions: dict[str, list[str | None]] = defaultdict(list)
        for publication, partition in sorted(self.delivered_keys, key=str):
            partitions[publication].append(partition)
        return json.dumps({"upto": self.last_id, "passed_on": partitions})

    @classmethod
    def from_json(cls, cursor: str) -> Self:
        """The reverse of `to_json`."""
        data = json.loads(cursor)
        names: Mapping[str, Sequence[str | None]] = data["passed_on"]
        return cls(data["upto"], frozenset((pub, part) for pub, parts in names.items() for part in parts))


def read_new_reports(
    instance: DagsterInstance, key: AssetKey, last_cursor: ReportCursor | None, *, start_id: int, last_id: int
) -> tuple[list[PublicationReport], ReportCursor]:
    """The publications told since `last_cursor` and up to the event `last_id`, and the position after them.

    Without a `last_cursor` position what was told up to the event `start_id` counts as passed on: history
    does not fire.
    """
    since_id = last_cursor.last_id if last_cursor else start_id
    reports = list(
        iter_publication_reports(instance, key, after_id=since_id - REREAD_EVENT_IDS, last_id=last_id)
    )
    delivered_keys = (
        last_cursor.delivered_keys
        if last_cursor
        else {report.key for report in reports if report.storage_id <= since_id}
    )
    new_reports = {report.key: report for report in reports if report.key not in delivered_keys}
    recent_keys = {report.key for report in reports if report.storage_id > last_id - REREAD_EVENT_IDS}
    return list(new_reports.values()), ReportCursor(last_id, frozenset(recent_keys))


ABANDONED_AFTER = timedelta(hours=6)
"""A run without a verdict that Dagster has not touched for so long holds nothing up; the reaper's limit."""


def newly_published(*, ignore_same_run: bool = False) -> PublishedCondition:
    """True for the partitions of an asset whose publication was told since the last evaluation.

    For dependencies: `AutomationCondition.any_deps_match(published())`. Like Dagster's `newly_updated()` it
    is true in one evaluation, so combine it with `.since(AutomationCondition.newly_requested())` where
    something else may hold the request back. Not with `.since_last_handled()`: that forgets what was
    published while the last request was made, and what a run materialised that had not seen it.

    Only `publication_automation_sensor()` evaluates it.

    Args:
        ignore_same_run (bool): Leave out a publication whose run wrote everything that depends on it as
            well. (default: False)

    Returns:
        AutomationCondition: Of an asset; on a check it is a ConfigurationError, because nobody publishes one.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import published

            @dg.asset(
                deps=["prices"],
                automation_condition=dg.AutomationCondition.any_deps_match(published()).since(
                    dg.AutomationCondition.newly_requested()
                ),
            )
            def report(): ...
    """
    return PublishedCondition(ignore_same_run)


def awaiting_verdict() -> AwaitingVerdictCondition:
    """True for partitions that a run has materialised on its branch and nobody has judged yet.

    Until then `main` does not have them, and a second run of them would be refused for changing the same
    partitions. A run that Dagster has not touched for 6 h holds nothing up. Never true for a check.

    Returns:
        AutomationCondition: To be negated.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import awaiting_verdict

            @dg.asset(automation_condition=dg.AutomationCondition.on_cron("0 * * * *") & ~awaiting_verdict())
            def prices(): ...
    """
    return AwaitingVerdictCondition()


def on_publication() -> AndAutomationCondition[AssetOrCheckKey]:
    """Request an asset when any of its upstreams was published, by the asset's partition mappings.

    Each publication leads to one request, made after it. It waits while the partition is in progress or
    awaits its verdict, and serves all publications that came meanwhile. Runs that were blocked, refused
    or discarded do not count, nor does what was published before the condition was first evaluated.

    Returns:
        AutomationCondition: Evaluated by `publication_automation_sensor()` only.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import on_publication, publication_automation_sensor

            @dg.asset(deps=["prices"], automation_condition=on_publication())
            def report(): ...

            defs = dg.Definitions(assets=[report], sensors=[publication_automation_sensor()])
    """
    return (
        AutomationCondition.any_deps_match(newly_published(ignore_same_run=True))
        .since(AutomationCondition.newly_requested())
        .with_label("any_deps_published_since_last_request")
        & ~AutomationCondition.in_progress()
        & ~awaiting_verdict()
    ).with_label("on_publication")


def publication_automation_sensor(
    name: str = "publication_automation_sensor",
    *,
    target: CoercibleToAssetSelection | None = None,
    minimum_interval_seconds: int = 8,
    default_status: DefaultSensorStatus = DefaultSensorStatus.RUNNING,
) -> AutomationConditionSensorDefinition:
    """The sensor that evaluates conditions on publications, and all others of its assets, in the code server.

    Dagster's daemon cannot import conditions of this package and says nothing about them.

    Args:
        name (str): The sensor's name. (default: `publication_automation_sensor`)
        target (Optional[CoercibleToAssetSelection]): Whose conditions; Dagster allows 500 with a condition
            per sensor. An asset must not stand in the target of two such sensors: both would request it.
            (default: all assets and their checks)
        minimum_interval_seconds (int): Seconds between two ticks. Dagster looks for due sensors every 5 s,
            so 8 s means 10. (default: 8)
        default_status (DefaultSensorStatus): Whether it starts as running. (default: RUNNING)

    Returns:
        AutomationConditionSensorDefinition: Evaluated in the code server.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import branchlake_definitions, publication_automation_sensor

            defs = dg.Definitions.merge(
                branchlake_definitions(),
                dg.Definitions(assets=[report], sensors=[publication_automation_sensor()]),
            )
    """
    with warnings.catch_warnings():
        # `use_user_code_server`: the only way to evaluate conditions that the daemon cannot import.
        warnings.simplefilter("ignore", BetaWarning)
        return AutomationConditionSensorDefinition(
            name,
            target=AssetSelection.all() if target is None else target,
            minimum_interval_seconds=minimum_interval_seconds,
            default_status=default_status,
            description="Requests assets by their automation conditions, also by publications.",
            use_user_code_server=True,
        )


def never_evaluated(repository: RepositoryDefinition) -> list[AssetOrCheckKey]:
    """What has a condition of this module that no sensor evaluates; Dagster itself says nothing about it."""
    graph = repository.asset_graph
    covered_keys: set[AssetOrCheckKey] = set()
    for sensor in repository.sensor_defs:
        if sensor.sensor_type.name == "AUTOMATION" and sensor.asset_selection is not None:
            covered_keys |= sensor.asset_selection.resolve(graph) | sensor.asset_selection.resolve_checks(
                graph
            )
    keys: set[AssetOrCheckKey] = {*graph.materializable_asset_keys, *graph.asset_check_keys}
    missed_keys = (
        key
        for key in keys - covered_keys
        if (condition := graph.get(key).automation_condition) is not None and _is_from_this_package(condition)
    )
    return sorted(missed_keys, key=lambda key: key.to_user_string())


def _is_from_this_package(condition: AutomationCondition[Any]) -> bool:
    of_this_package = type(condition).__module__.startswith("branchlake_dagster.")
    return of_this_package or any(map(_is_from_this_package, condition.children))


@dataclass(frozen=True)
class PublishedCondition(AutomationCondition[AssetKey]):
    """See `newly_published()`. Its cursor is a `ReportCursor` in what the asset was told."""

    ignore_same_run: bool = False

    @property
    def name(self) -> str:
        """Part of the condition's identity: another name starts with an empty cursor."""
        return f"published(ignore_same_run={self.ignore_same_run})"

    @property
    def description(self) -> str:
        """For the UI."""
        return "Published to main since the last evaluation"

    def evaluate(self, context: AutomationContext[AssetKey]) -> AutomationResult[AssetKey]:
        """The newly published partitions; raises ConfigurationError on a check, which nobody publishes."""
        if not isinstance(context.key, AssetKey):
            raise ConfigurationError(
                f"published() is about assets, and {context.key.to_user_string()} is a check.",
                hint="Use AutomationCondition.any_deps_match(published()): a check depends on its asset.",
            )
        last_id = context.max_storage_id or 0
        last_cursor = ReportCursor.from_json(context.cursor) if context.cursor else None
        # A condition that was rewritten has no cursor; the asset's last evaluation still counts.
        start_id = (
            last_id if context.previous_evaluation_time is None else context.previous_max_storage_id or 0
        )
        new_reports, new_cursor = read_new_reports(
            context.asset_graph_view.instance, context.key, last_cursor, start_id=start_id, last_id=last_id
        )
        if self.ignore_same_run:
            new_reports = _drop_same_run_reports(context, new_reports)
        subset = _to_subset(context, context.key, {report.partition for report in new_reports})
        subset = context.candidate_subset.compute_intersection(subset)
        # A publication told since the last evaluation is later than the request made in it, whatever the
        # clocks of the publisher and of this process say: SINCE would otherwise drop it.
        timestamps = {context.evaluation_time.timestamp(): subset}
        return AutomationResult(
            context,
            subset,
            cursor=new_cursor.to_json(),
            timing_metadata=None if subset.is_empty else TimingMetadata(timestamps=timestamps),
        )


@dataclass(frozen=True)
class AwaitingVerdictCondition(AutomationCondition[AssetOrCheckKey]):
    """See `awaiting_verdict()`. Never true for a check: it writes nothing."""

    @property
    def name(self) -> str:
        """Shown in the UI."""
        return "awaiting_verdict"

    @property
    def description(self) -> str:
        """For the UI."""
        return "Materialised on a branch and not judged yet"

    @property
    def requires_cursor(self) -> bool:
        """Everything it needs stands in Dagster's runs."""
        return False

    def evaluate(self, context: AutomationContext[AssetOrCheckKey]) -> AutomationResult[AssetOrCheckKey]:
        """The partitions that unjudged runs have materialised."""
        subset: EntitySubset[Any] = context.get_empty_subset()
        key = context.key
        if isinstance(key, AssetKey) and not context.candidate_subset.is_empty:
            instance = context.asset_graph_view.instance
            runs_filter = RunsFilter(
                tags={RunTag.VERDICT: PENDING}, updated_after=context.evaluation_time - ABANDONED_AFTER
            )
            partitions: set[str | None] = set()
            for run in instance.get_runs(filters=runs_filter):
                if not run.asset_selection or key in run.asset_selection:
                    partitions |= load_run_partitions(instance, run).get(key, set())
            subset = _to_subset(context, key, partitions)
        return AutomationResult(context, context.candidate_subset.compute_intersection(subset))


def _drop_same_run_reports(
    context: AutomationContext[AssetKey], reports: Iterable[PublicationReport]
) -> list[PublicationReport]:
    """Without the publications of branches that carry all partitions of the target that depend on them."""
    target = context.root_context.key
    if not isinstance(target, AssetKey) or target not in context.asset_graph.get(context.key).child_keys:
        return list(reports)
    reports_by_branch: dict[str, list[PublicationReport]] = defaultdict(list)
    for report in reports:
        reports_by_branch[report.branch].append(report)
    target_partitions = load_asset_partitions(context.asset_graph_view.instance, reports_by_branch, target)
    remaining: list[PublicationReport] = []
    for branch, branch_reports in reports_by_branch.items():
        if partitions := target_partitions.get(branch):
            published_subset = _to_subset(
                context, context.key, {telling.partition for telling in branch_reports}
            )
            dependents = published_subset.compute_mapped_subset(target, direction="down")
            if dependents.compute_difference(_to_subset(context, target, partitions)).is_empty:
                continue
        remaining += branch_reports
    return remaining


def _to_subset(
    context: AutomationContext[AssetKey] | AutomationContext[AssetOrCheckKey],
    key: AssetKey,
    partitions: Iterable[str | None],
) -> EntitySubset[AssetKey]:
    """The partitions of `key` that still exist; for an asset without partitions all of it or nothing."""
    return context.asset_graph_view.get_asset_subset_from_asset_partitions(
        key, {AssetKeyPartitionKey(key, partition) for partition in partitions}, validate_existence=True
    )
