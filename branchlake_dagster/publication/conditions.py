"""Automation conditions that follow publication: an upstream counts as updated once `main` has it.

Dagster's own conditions (`eager()`, `any_deps_updated()`) follow materializations, and a run materializes on
its branch, where other runs do not see it. These conditions follow the observations that the publisher
reports for each asset after the merge. Dagster's daemon does not load classes of this package, so only a
sensor that evaluates in the code server can use them: `publication_automation_sensor()`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from dagster import (
    AssetKey,
    AssetOrCheckKey,
    AssetSelection,
    AutomationCondition,
    AutomationConditionSensorDefinition,
    AutomationContext,
    AutomationResult,
    BetaWarning,
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
from branchlake_dagster.publication.new_publications import (
    PublicationReader,
    ReportedPublication,
    ReportReader,
    load_asset_partitions,
    load_run_partitions,
)
from branchlake_dagster.runs.run_tags import PENDING
from branchlake_dagster.stored_names import RunTag

ABANDONED_AFTER = timedelta(hours=6)
"""The age after which a run without a verdict is ignored if Dagster has not updated it; as for the reaper."""


def newly_published(*, ignore_same_run: bool = False) -> PublishedCondition:
    """A condition that is true for partitions whose publication was reported since the last evaluation.

    For dependencies: `AutomationCondition.any_deps_match(newly_published())`. Like Dagster's
    `newly_updated()` it is true in one evaluation. Combine it with
    `.since(AutomationCondition.newly_requested())` if another condition can delay the request. Do not use
    `.since_last_handled()`: that ignores what was published while the last request was made, and what a run
    materialized that had not read it.

    Only `publication_automation_sensor()` evaluates it.

    Args:
        ignore_same_run (bool): Ignore a publication whose run also wrote all partitions that depend on it.
            (default: False)

    Returns:
        AutomationCondition: Of an asset. On a check it raises ConfigurationError, because checks are not
            published.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import newly_published

            @dg.asset(
                deps=["prices"],
                automation_condition=dg.AutomationCondition.any_deps_match(newly_published()).since(
                    dg.AutomationCondition.newly_requested()
                ),
            )
            def report(): ...
    """
    return PublishedCondition(ignore_same_run)


def awaiting_verdict() -> AwaitingVerdictCondition:
    """A condition that is true for partitions which a run has materialized but which are not judged yet.

    Until the verdict these partitions are on the run's branch only, and a second run of the same partitions
    would be refused. A run that Dagster has not updated for 6 h is ignored. Never true for a check.

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
    """Request an asset when one of its upstreams was published, by the asset's partition mappings.

    Each publication leads to one request, which is made after it. The request waits while the partition is in
    progress or awaits its verdict, and then serves all publications of the meantime. Runs that were blocked,
    refused or discarded do not count. Neither do publications before the condition's first evaluation.

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
    """The sensor that evaluates conditions on publications in the code server, with all others of its assets.

    Dagster's daemon cannot import conditions of this package, and does not report that it skips them.

    Args:
        name (str): The sensor's name. (default: `publication_automation_sensor`)
        target (Optional[CoercibleToAssetSelection]): The assets whose conditions are evaluated. Dagster
            allows 500 with a condition per sensor. An asset must not be in the target of two such sensors:
            both would request it. (default: all assets and their checks)
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
            description="Requests assets by their automation conditions, also those on publications.",
            use_user_code_server=True,
        )


def never_evaluated(repository: RepositoryDefinition) -> list[AssetOrCheckKey]:
    """Return the assets and checks with a condition of this package that no suitable sensor selects.

    Suitable are sensors that evaluate conditions in the code server, even if they are stopped. Dagster's
    default sensor evaluates conditions in the daemon, so it is not suitable. Dagster itself does not report
    these assets and checks.
    """
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


def follows_publications(condition: AutomationCondition[Any] | None) -> bool:
    """Return whether a condition may request its asset because an upstream changed on `main`."""
    if condition is None:
        return False
    follows = getattr(condition, "follows_publications", False)
    return follows or any(map(follows_publications, condition.children))


def _is_from_this_package(condition: AutomationCondition[Any]) -> bool:
    of_this_package = type(condition).__module__.startswith("branchlake_dagster.")
    return of_this_package or any(map(_is_from_this_package, condition.children))


@dataclass(frozen=True)
class PublishedCondition(AutomationCondition[AssetKey]):
    """True for partitions whose publication was reported since the last evaluation.

    This is the condition of `newly_published()`. Its cursor is the text of a `ReportCursor`.
    """

    follows_publications: ClassVar[bool] = True
    ignore_same_run: bool = False

    @property
    def name(self) -> str:
        """Part of the condition's identity: with another name the condition starts with an empty cursor."""
        return f"published(ignore_same_run={self.ignore_same_run})"

    @property
    def description(self) -> str:
        """The text that Dagster's pages show."""
        return "Published to main since the last evaluation"

    def evaluate(self, context: AutomationContext[AssetKey]) -> AutomationResult[AssetKey]:
        """Return the newly published partitions.

        Raises ConfigurationError on a check, because checks are not published.
        """
        if not isinstance(context.key, AssetKey):
            raise ConfigurationError(
                f"newly_published() works on assets, and {context.key.to_user_string()} is a check.",
                hint="Use AutomationCondition.any_deps_match(newly_published()).",
            )
        last_id = context.max_storage_id or 0
        # A changed condition has an empty cursor; the asset's last evaluation still counts.
        start_id = (
            last_id if context.previous_evaluation_time is None else context.previous_max_storage_id or 0
        )
        reader: PublicationReader[ReportedPublication] = ReportReader(
            context.asset_graph_view.instance, context.key, start_id, last_id
        )
        new = reader.read_since(context.cursor)
        publications = new.publications
        if self.ignore_same_run:
            publications = _drop_same_run(context, publications)
        subset = _to_subset(context, context.key, {key for one in publications for key in one.partitions})
        subset = context.candidate_subset.compute_intersection(subset)
        # A publication reported since the last evaluation is later than the request made in that evaluation,
        # even if the clocks of publisher and code server differ: SINCE would otherwise drop it.
        timestamps = {context.evaluation_time.timestamp(): subset}
        return AutomationResult(
            context,
            subset,
            cursor=new.cursor,
            timing_metadata=None if subset.is_empty else TimingMetadata(timestamps=timestamps),
        )


@dataclass(frozen=True)
class AwaitingVerdictCondition(AutomationCondition[AssetOrCheckKey]):
    """The condition of `awaiting_verdict()`. Never true for a check, because checks do not write tables."""

    @property
    def name(self) -> str:
        """The name that Dagster's pages show."""
        return "awaiting_verdict"

    @property
    def description(self) -> str:
        """The text that Dagster's pages show."""
        return "Materialized on a branch and not judged yet"

    @property
    def requires_cursor(self) -> bool:
        """False, because each evaluation reads the current runs from Dagster."""
        return False

    def evaluate(self, context: AutomationContext[AssetOrCheckKey]) -> AutomationResult[AssetOrCheckKey]:
        """Return the partitions that runs without a verdict have materialized."""
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


def _drop_same_run(
    context: AutomationContext[AssetKey], publications: Sequence[ReportedPublication]
) -> Sequence[ReportedPublication]:
    """Return the publications without those whose branch also wrote all partitions that depend on them.

    The dependent partitions are those of the asset that has the whole condition. All publications are
    returned if that asset does not directly depend on the published asset. Undos are always returned: they
    do not recompute anything.
    """
    target = context.root_context.key
    if not isinstance(target, AssetKey) or target not in context.asset_graph.get(context.key).child_keys:
        return publications
    target_partitions = load_asset_partitions(
        context.asset_graph_view.instance, [one.branch for one in publications if one.branch], target
    )

    def depends_on_more(publication: ReportedPublication) -> bool:
        written = _to_subset(context, target, target_partitions.get(publication.branch, ()))
        published = _to_subset(context, context.key, publication.partitions)
        dependents = published.compute_mapped_subset(target, direction="down")
        return not dependents.compute_difference(written).is_empty

    return [one for one in publications if one.branch not in target_partitions or depends_on_more(one)]


def _to_subset(
    context: AutomationContext[AssetKey] | AutomationContext[AssetOrCheckKey],
    key: AssetKey,
    partitions: Iterable[str | None],
) -> EntitySubset[AssetKey]:
    """Return the given partitions of `key` as a subset, without partitions that no longer exist.

    For an asset without partitions, the subset is the whole asset if `partitions` contains None, else empty.
    """
    return context.asset_graph_view.get_asset_subset_from_asset_partitions(
        key, {AssetKeyPartitionKey(key, partition) for partition in partitions}, validate_existence=True
    )
