"""The sensor that launches consumers when `main` has changes that they have not consumed.

This module has no postponed annotations: Dagster compares the annotation of `context` with the class itself.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from dagster import (
    AssetKey,
    AssetObservation,
    AssetSelection,
    DagsterInstance,
    DefaultSensorStatus,
    MetadataValue,
    RepositoryDefinition,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    sensor,
)

from branchlake_dagster.automation.backlog import (
    ConsumerBacklog,
    ConsumingAsset,
    find_downstream,
    iter_consumers,
    join_chains,
    order_by_inputs,
)
from branchlake_dagster.automation.launch_decision import (
    STUCK_STATES,
    LaunchDecision,
    LaunchPolicy,
    decide_launch,
    format_approval,
)
from branchlake_dagster.automation.partition_backlog import (
    SHOWN_PARTITIONS,
    InFlightRuns,
    PartitionBacklog,
    RecentFailures,
    backlog_metadata,
    iter_histories,
    launch_decisions,
    partition_backlogs,
)
from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.incremental.affected_partitions import partition_coverage
from branchlake_dagster.incremental.positions import Unconsumed
from branchlake_dagster.internals.dagster import RANGE_END_TAG, RANGE_START_TAG, CoercibleToAssetSelection
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.runs.approval import Approvals
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import AssetMetadata, RunTag
from branchlake_dagster.wording import format_count, format_names


def incremental_sensor(
    name: str = "incremental_sensor",
    *,
    target: CoercibleToAssetSelection | None = None,
    min_rows: int = 1,
    min_files: int = 1,
    max_age_s: float = 3600.0,
    when_inputs_idle: bool = False,
    max_runs: int = 25,
    retries: int = 0,
    retry_delay_seconds: float = 60.0,
    minimum_interval_seconds: int = 3,
    with_downstream: bool = False,
    default_status: DefaultSensorStatus = DefaultSensorStatus.RUNNING,
    lakehouse_key: str = "lakehouse",
) -> SensorDefinition:
    """Return a sensor that launches assets with `consumes(…)` when `main` has changes to consume.

    An asset without partitions gets one run. A partitioned asset gets one run for each partition that the
    change affects. With `from_start=True`, a partition is launched after the partition before it is
    published, or one run computes as many partitions as the asset's backfill policy allows. Partitions that
    a run computes, or that wait for their verdict, are not launched again. A consumer waits for the tables of
    all inputs that the lake's IO manager loads for it. Without `retries`, the sensor
    launches one run for each state of the inputs, so a failed run waits for the next change or for a person.
    Each consumer's page shows what it has left: an observation at every change, with the first 20 partitions
    and why each of them is not launched.

    Args:
        name (str): The sensor's name. (default: `incremental_sensor`)
        target (Optional[CoercibleToAssetSelection]): The assets. (default: all that consume changes)
        min_rows (int): The smallest number of changed rows that is worth a run. (default: 1)
        min_files (int): The smallest number of changed files that is worth a run. (default: 1)
        max_age_s (float): Age in seconds at which a change below `min_rows` or `min_files` is launched, too.
            Without those two each change is launched at once, whatever its age. (default: an hour)
        when_inputs_idle (bool): Whether a change below `min_rows` or `min_files` is also launched as soon as
            no run computes an input of its consumer, or waits for its publication. So the changes of several
            runs that end one after the other are consumed together. Live runs of an ingestion do not count.
            (default: False)
        max_runs (int): The largest number of runs per tick. The next tick continues. (default: 25)
        retries (int): How often a failed run is launched again for the same state of its inputs. Runs count
            as failed if a step or check crashed, or if `main` had an overlapping change. Runs that their
            checks blocked are not retried, because the same data would fail again. Nor are canceled runs.
            (default: 0)
        retry_delay_seconds (float): Seconds from the end of a failed run to its first retry. Each later retry
            waits twice as long as the one before it, up to a day. (default: 60)
        minimum_interval_seconds (int): Seconds between two ticks. Dagster looks for due sensors every 5 s,
            and would skip every second time with an interval of 5. (default: 3, a tick every 5 s)
        with_downstream (bool): Whether the run of an asset also computes the assets of `target` that consume
            its changes and have the same partitions. So one run and one publication bring a chain of assets
            up to date. Only one such run of a chain exists at a time: an asset that consumes changes on the
            branch of its own run would conflict with the same asset in a parallel run. (default: False: each
            asset gets its own runs)
        default_status (DefaultSensorStatus): The sensor's status when it is first loaded. (default: RUNNING)
        lakehouse_key (str): The resource key of the lake. (default: `lakehouse`)

    Returns:
        SensorDefinition: The sensor. The skip reason and the cursor of each tick describe what it found.

    Raises:
        ConfigurationError: `retries` or `retry_delay_seconds` is negative.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import branchlake_definitions, incremental_sensor

            defs = branchlake_definitions(
                definitions=dg.Definitions(
                    assets=[orders, spent], sensors=[incremental_sensor(min_rows=1000, max_age_s=60)]
                )
            )
    """
    selection = AssetSelection.all() if target is None else AssetSelection.from_coercible(target)
    policy = LaunchPolicy(
        min_rows, min_files, max_age_s, retries, retry_delay_seconds, when_inputs_idle=when_inputs_idle
    )
    last_shown: dict[AssetKey, object] = {}

    @sensor(
        name=name,
        required_resource_keys={lakehouse_key},
        asset_selection=selection,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Launches assets that consume changes when main has changes they have not consumed.",
        metadata={AssetMetadata.LAUNCH_POLICY: MetadataValue.json(asdict(policy))},
    )
    def incremental_sensor_(context: SensorEvaluationContext, **_: object) -> SensorResult:
        # When the sensor is called like a function, as in tests, Dagster also passes resources by name.
        repository = context.repository_def
        assert repository is not None  # noqa: S101 - the daemon always evaluates in a code location
        lake: LakehouseResource = getattr(context.resources, lakehouse_key)
        graph, namespace = repository.asset_graph, lake.lakehouse.settings.default_namespace
        assets = list(iter_consumers(graph, namespace, selection.resolve(graph, allow_missing=True)))
        main_hash = lake.lakehouse.nessie.reference(MAIN).hash
        # Dagster's page shows the cursor, so it is a sentence.
        quiet_cursor = f"all is consumed at {main_hash}, {_fingerprint_consumers(assets, context.instance)}"
        if context.cursor == quiet_cursor:
            return SensorResult(
                skip_reason=SkipReason("Nothing was published since the last tick."), cursor=context.cursor
            )
        now = datetime.now(UTC)
        tick = _SensorTick(lake, context.instance, policy, now, max_runs)
        if with_downstream:
            tick.downstream = find_downstream(assets)
            tick.chains = join_chains(tick.downstream)
            assets = order_by_inputs(assets)
        for asset in assets:
            tick.evaluate_consumer(asset)
        observations = [*tick.iter_observations(last_shown)]
        for line in tick.log_lines:
            context.log.info(line)
        return SensorResult(
            run_requests=tick.run_requests,
            asset_events=observations,
            skip_reason=None if tick.run_requests else SkipReason(tick.format_summary()),
            cursor=quiet_cursor if tick.is_quiet else tick.format_summary(),
        )

    return incremental_sensor_


def _fingerprint_consumers(assets: Iterable[ConsumingAsset], instance: DagsterInstance) -> str:
    """Return a hash (12 hex digits) that changes if the assets, their declarations or partitions change."""
    consumer_states = [
        (
            asset.key.to_user_string(),
            repr(asset.consumer.declaration),
            partition_coverage(asset.consumer.definition, instance=instance)
            if asset.consumer.definition
            else None,
        )
        for asset in assets
    ]
    return hashlib.sha256(repr(consumer_states).encode()).hexdigest()[:12]


class _SensorTick:
    """One tick of the sensor: the backlog of each consumer, and the runs to launch."""

    def __init__(
        self,
        lake: LakehouseResource,
        instance: DagsterInstance,
        policy: LaunchPolicy,
        now: datetime,
        max_runs: int,
    ) -> None:
        self._lake = lake
        self._instance = instance
        self._policy = policy
        self._now = now
        self._max_runs = max_runs
        self._in_flight = InFlightRuns(instance, now)
        self._approvals = Approvals(instance)
        self._approval_ids: set[str] = set()
        """The ids under which the changes that wait for approval can be approved."""
        self.run_requests: list[RunRequest] = []
        self.log_lines: list[str] = []
        self.unconsumed_by_asset: dict[AssetKey, Unconsumed] = {}
        self._backlogs: dict[AssetKey, ConsumerBacklog] = {}
        self._decisions: dict[AssetKey, Sequence[tuple[str | None, LaunchDecision]]] = {}
        """The decisions about the first pending partitions of each consumer."""
        self.downstream: Mapping[AssetKey, Sequence[AssetKey]] = {}
        """The other assets that the run of an asset computes; empty without `with_downstream`."""
        self.chains: Mapping[AssetKey, Collection[AssetKey]] = {}
        """The assets of each asset's chain. Only one run of a chain is launched at a time."""
        self._failures: dict[str, str] = {}
        """The errors of consumers that could not be evaluated, by asset."""
        self._requested: set[AssetKey] = set()
        """The assets of chains for which this tick has launched a run."""
        self.is_quiet = True
        """Whether no consumer has a backlog or a problem."""

    def evaluate_consumer(self, asset: ConsumingAsset) -> None:
        """Plan the runs of one consumer. An error is logged and does not affect other consumers."""
        backlog = ConsumerBacklog(
            self._lake,
            asset.consumer,
            instance=self._instance,
            per_run=asset.per_run,
            whole_inputs=asset.whole_inputs,
        )
        name = asset.key.to_user_string()
        try:
            unconsumed = self.unconsumed_by_asset[asset.key] = backlog.unconsumed
            self.run_requests += islice(
                self._iter_due_requests(asset, backlog, unconsumed), self._max_runs - len(self.run_requests)
            )
            self._backlogs[asset.key] = backlog
            self._decisions[asset.key] = launch_decisions(
                asset.key,
                backlog,
                self._instance,
                self._in_flight,
                self._policy,
                self._now,
                approvals=self._approvals,
                max_partitions=SHOWN_PARTITIONS,
            )
        except Exception as error:  # noqa: BLE001 - a store or a table's metadata may raise anything
            self._record_failure(name, error)
            return
        if unconsumed.has_any or unconsumed.trouble or unconsumed.missing_input:
            self.is_quiet = False
            self.log_lines.append(f"{name}: {unconsumed.format_summary()}")

    def _record_failure(self, name: str, error: Exception) -> None:
        self.is_quiet = False
        message = str(error) if isinstance(error, BranchlakeError) else f"{type(error).__name__}: {error}"
        self._failures[name] = f"{name}: {message}"
        self.log_lines.append(self._failures[name])

    def iter_observations(self, last_shown: dict[AssetKey, object]) -> Iterator[AssetObservation]:
        """Yield an observation for each consumer whose backlog changed. Updates `last_shown`.

        A consumer gets an observation if its unconsumed change or its failed runs differ from `last_shown`.
        So a run that starts or succeeds adds no event. Only these observations count the backlog of each
        partition.
        """
        for key, unconsumed in self.unconsumed_by_asset.items():
            decisions = self._decisions.get(key, ())
            stuck_decisions = [
                (partition, decision.state, decision.run_id)
                for partition, decision in decisions
                if decision.state in STUCK_STATES
            ]
            if last_shown.get(key) == (shown_state := (unconsumed, stuck_decisions)):
                continue
            last_shown[key] = shown_state
            partitions: Sequence[PartitionBacklog] = ()
            partition_count: int | None = None
            try:
                if backlog := self._backlogs.get(key):
                    partitions = partition_backlogs(backlog, decisions)
                    if backlog.by_partition and not (unconsumed.trouble or unconsumed.missing_input):
                        partition_count = len(backlog.pending_partitions)
            except Exception as error:  # noqa: BLE001 - the error is logged, and the other assets continue
                self._record_failure(key.to_user_string(), error)
            metadata = backlog_metadata(unconsumed, self._now, partitions, partition_count, self._policy)
            yield AssetObservation(key, metadata=metadata)

    def _iter_due_requests(
        self, asset: ConsumingAsset, backlog: ConsumerBacklog, unconsumed: Unconsumed
    ) -> Iterator[RunRequest]:
        """Yield the run requests of one consumer that are due.

        A partition that is not published yet delays the partitions that are computed from it. A change that
        waits for approval is launched only after its approval. Of a chain, one run is launched, of the oldest
        partition. A partition whose runs failed comes after the others, for a time that doubles with each
        failure.
        """
        computed_keys = [asset.key, *self.downstream.get(asset.key, ())]
        chain = self.chains.get(asset.key, {asset.key})
        policy = self._in_flight.applicable_policy(self._policy, asset.consumer.inputs)
        if not policy.is_reached(unconsumed, self._now) or any(map(self._in_flight.has_whole_run, chain)):
            return
        busy_partitions = {key for one in chain for key in self._in_flight.single_partitions(one)}
        is_chain = len(chain) > 1
        if is_chain and (busy_partitions or not self._requested.isdisjoint(chain)):
            return
        runs: list[tuple[str, ...]] = [()]
        if backlog.by_partition:
            runs = [run.partitions for run in backlog.batches if busy_partitions.isdisjoint(run.partitions)]
        partitions: list[str | None] = [None]
        if backlog.by_partition:
            partitions = [key for run in runs for key in run]
        held_partitions = backlog.held_partitions(partitions, self._approvals)
        self._approval_ids.update(name for names in held_partitions.values() for name in names)
        runs = [run for run in runs if held_partitions.keys().isdisjoint(run or (None,))]
        if is_chain and len(runs) > 1:
            # Only one of them is launched. A partition that always fails must not keep the others waiting.
            failures = self._in_flight.recent_failures(asset.key)
            runs.sort(key=lambda run: run[0] in failures and self._is_backing_off(failures[run[0]]))
        keys = (backlog.state_key(run[0] if run else None) for run in runs)
        for run, history in zip(
            runs, iter_histories(self._instance, keys, self._policy.retries), strict=True
        ):
            decision = decide_launch(unconsumed, history, None, policy, self._now)
            if decision.run_key is not None:
                tags = {RunTag.HELD_UNTIL_APPROVED: "true"} | (
                    {RunTag.RETRY: str(decision.retry_number)} if decision.retry_number else {}
                )
                if len(run) > 1:
                    tags |= {RANGE_START_TAG: run[0], RANGE_END_TAG: run[-1]}
                self._requested.update(chain if is_chain else ())
                yield RunRequest(
                    decision.run_key,
                    asset_selection=computed_keys,
                    partition_key=run[0] if len(run) == 1 else None,
                    tags=tags,
                )
                if is_chain:
                    return

    def _is_backing_off(self, failures: RecentFailures) -> bool:
        return self._now < failures.last_ended_at + self._policy.delay_before_retry(failures.count)

    def format_summary(self) -> str:
        """Return a one-line summary of the tick."""
        asset_names = [
            key.to_user_string() for key, unconsumed in self.unconsumed_by_asset.items() if unconsumed.has_any
        ]
        if not asset_names:
            problems = [
                one.trouble or one.missing_input
                for one in self.unconsumed_by_asset.values()
                if one.trouble or one.missing_input
            ]
            problems += self._failures.values()
            names = {key.to_user_string() for key in self.unconsumed_by_asset} | self._failures.keys()
            checked_clause = f"{format_count(len(names), 'consumer')} checked"
            return f"{checked_clause}; {problems[0]}" if problems else f"{checked_clause}, nothing to consume"
        launched_clause = (
            f", {format_count(len(self.run_requests), 'run')} launched" if self.run_requests else ""
        )
        waiting_clause = (
            f"; a part of it {format_approval(sorted(self._approval_ids))}" if self._approval_ids else ""
        )
        return f"change for {format_names('asset', asset_names[:5])}{launched_clause}{waiting_clause}"


@dataclass(frozen=True)
class DeclaredSensor:
    """An incremental sensor of a code location, with its launch policy."""

    name: str
    policy: LaunchPolicy
    running_by_default: bool


def declared_sensors(repository: RepositoryDefinition) -> dict[AssetKey, DeclaredSensor]:
    """Map each asset to the incremental sensor that targets it; if there are several, the first by name.

    Assets of `repository` without such a sensor are omitted.
    """
    graph = repository.asset_graph
    sensor_by_asset: dict[AssetKey, DeclaredSensor] = {}
    for definition in sorted(repository.sensor_defs, key=lambda sensor: sensor.name):
        stored_policy: Any = definition.metadata.get(AssetMetadata.LAUNCH_POLICY)
        if stored_policy is None or definition.asset_selection is None:
            continue
        is_running = definition.default_status is DefaultSensorStatus.RUNNING
        declared_sensor = DeclaredSensor(definition.name, LaunchPolicy(**stored_policy.value), is_running)
        for key in definition.asset_selection.resolve(graph, allow_missing=True):
            sensor_by_asset.setdefault(key, declared_sensor)
    return sensor_by_asset
