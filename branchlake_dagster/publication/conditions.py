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
from branchlake_dagster.publication.written_partitions import brought_by, written_with
from branchlake_dagster.runs.run_tags import PENDING
from branchlake_dagster.stored_names import EventMetadata, RunTag

LOOK_BACK = 1_000
"""How many event ids are read again: more than Dagster stores while one insert is under way."""

_PAGE = 1_000

Name = tuple[str, str | None]
"""(branch and commit on `main`, partition): the same however often it is told."""


@dataclass(frozen=True)
class Report:
    """One observation of a publication: its place in the event log, and what was published as what."""

    storage_id: int
    branch: str
    commit: str
    partition: str | None

    @property
    def name(self) -> Name:
        """What makes it the same as another telling."""
        return f"{self.branch}@{self.commit}", self.partition


def reports(instance: DagsterInstance, key: AssetKey, *, after: int, upto: int) -> Iterator[Report]:
    """The publications told to `key` with `after` < storage id <= `upto`, in that order.

    What was told of blocked, refused and discarded runs has no publication and is left out, as are
    observations of others.
    """
    wanted = AssetRecordsFilter(asset_key=key, after_storage_id=max(after, 0), before_storage_id=upto + 1)
    cursor: str | None = None
    while True:
        page = instance.fetch_observations(wanted, limit=_PAGE, cursor=cursor, ascending=True)
        for record in page.records:
            observation = record.asset_observation
            if observation is None:
                continue
            commit, branch = (
                observation.metadata.get(EventMetadata.PUBLICATION),
                observation.metadata.get(EventMetadata.BRANCH),
            )
            if commit is not None and branch is not None:
                yield Report(record.storage_id, str(branch.value), str(commit.value), observation.partition)
        if not page.has_more:
            return
        cursor = page.cursor


@dataclass(frozen=True)
class Position:
    """How far an asset was read: up to this id, and the names passed on from the last `LOOK_BACK` ids."""

    upto: int
    passed_on: frozenset[Name] = field(default_factory=frozenset)

    def to_text(self) -> str:
        """A cursor for Dagster to keep."""
        partitions: dict[str, list[str | None]] = defaultdict(list)
        for publication, partition in sorted(self.passed_on, key=str):
            partitions[publication].append(partition)
        return json.dumps({"upto": self.upto, "passed_on": partitions})

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The reverse of `to_text`."""
        found = json.loads(text)
        names: Mapping[str, Sequence[str | None]] = found["passed_on"]
        return cls(found["upto"], frozenset((pub, part) for pub, parts in names.items() for part in parts))


def next_reports(
    instance: DagsterInstance, key: AssetKey, last: Position | None, *, start: int, upto: int
) -> tuple[list[Report], Position]:
    """The publications told since `last` and up to the event `upto`, and the position after them.

    Without a `last` position what was told up to the event `start` counts as passed on: history does not
    fire.
    """
    since = last.upto if last else start
    read = list(reports(instance, key, after=since - LOOK_BACK, upto=upto))
    known = last.passed_on if last else {telling.name for telling in read if telling.storage_id <= since}
    new = {telling.name: telling for telling in read if telling.name not in known}
    recent = {telling.name for telling in read if telling.storage_id > upto - LOOK_BACK}
    return list(new.values()), Position(upto, frozenset(recent))


FORGOTTEN_AFTER = timedelta(hours=6)
"""A run without a verdict that Dagster has not touched for so long holds nothing up; the reaper's limit."""


def published(*, ignore_same_run: bool = False) -> Published:
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
    return Published(ignore_same_run)


def awaiting_verdict() -> AwaitingVerdict:
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
    return AwaitingVerdict()


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
        AutomationCondition.any_deps_match(published(ignore_same_run=True))
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
    covered: set[AssetOrCheckKey] = set()
    for sensor in repository.sensor_defs:
        if sensor.sensor_type.name == "AUTOMATION" and sensor.asset_selection is not None:
            covered |= sensor.asset_selection.resolve(graph) | sensor.asset_selection.resolve_checks(graph)
    keys: set[AssetOrCheckKey] = {*graph.materializable_asset_keys, *graph.asset_check_keys}
    missed = (
        key
        for key in keys - covered
        if (condition := graph.get(key).automation_condition) is not None and _is_ours(condition)
    )
    return sorted(missed, key=lambda key: key.to_user_string())


def _is_ours(condition: AutomationCondition[Any]) -> bool:
    of_this_package = type(condition).__module__.startswith("branchlake_dagster.")
    return of_this_package or any(map(_is_ours, condition.children))


@dataclass(frozen=True)
class Published(AutomationCondition[AssetKey]):
    """See `published()`. Its cursor is a `Position` in what the asset was told."""

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
        upto = context.max_storage_id or 0
        last = Position.from_text(context.cursor) if context.cursor else None
        # A condition that was rewritten has no cursor; the asset's last evaluation still counts.
        start = upto if context.previous_evaluation_time is None else context.previous_max_storage_id or 0
        new, position = next_reports(
            context.asset_graph_view.instance, context.key, last, start=start, upto=upto
        )
        if self.ignore_same_run:
            new = _news(context, new)
        found = _subset(context, context.key, {telling.partition for telling in new})
        found = context.candidate_subset.compute_intersection(found)
        # A publication told since the last evaluation is later than the request made in it, whatever the
        # clocks of the publisher and of this process say: SINCE would otherwise drop it.
        times = {context.evaluation_time.timestamp(): found}
        return AutomationResult(
            context,
            found,
            cursor=position.to_text(),
            timing_metadata=None if found.is_empty else TimingMetadata(timestamps=times),
        )


@dataclass(frozen=True)
class AwaitingVerdict(AutomationCondition[AssetOrCheckKey]):
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
        found: EntitySubset[Any] = context.get_empty_subset()
        key = context.key
        if isinstance(key, AssetKey) and not context.candidate_subset.is_empty:
            instance = context.asset_graph_view.instance
            unjudged = RunsFilter(
                tags={RunTag.VERDICT: PENDING}, updated_after=context.evaluation_time - FORGOTTEN_AFTER
            )
            written: set[str | None] = set()
            for run in instance.get_runs(filters=unjudged):
                if not run.asset_selection or key in run.asset_selection:
                    written |= written_with(instance, run).get(key, set())
            found = _subset(context, key, written)
        return AutomationResult(context, context.candidate_subset.compute_intersection(found))


def _news(context: AutomationContext[AssetKey], told: Iterable[Report]) -> list[Report]:
    """Without the publications of branches that carry all partitions of the target that depend on them."""
    target = context.root_context.key
    if not isinstance(target, AssetKey) or target not in context.asset_graph.get(context.key).child_keys:
        return list(told)
    by_branch: dict[str, list[Report]] = defaultdict(list)
    for telling in told:
        by_branch[telling.branch].append(telling)
    brought = brought_by(context.asset_graph_view.instance, by_branch, target)
    found: list[Report] = []
    for branch, tellings in by_branch.items():
        if written := brought.get(branch):
            published = _subset(context, context.key, {telling.partition for telling in tellings})
            dependents = published.compute_mapped_subset(target, direction="down")
            if dependents.compute_difference(_subset(context, target, written)).is_empty:
                continue
        found += tellings
    return found


def _subset(
    context: AutomationContext[AssetKey] | AutomationContext[AssetOrCheckKey],
    key: AssetKey,
    partitions: Iterable[str | None],
) -> EntitySubset[AssetKey]:
    """The partitions of `key` that still exist; for an asset without partitions all of it or nothing."""
    return context.asset_graph_view.get_asset_subset_from_asset_partitions(
        key, {AssetKeyPartitionKey(key, partition) for partition in partitions}, validate_existence=True
    )
