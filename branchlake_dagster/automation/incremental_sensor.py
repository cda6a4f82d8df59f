"""The sensor that launches consumers when there is published change that they have not consumed.

No postponed annotations here: Dagster compares the annotation of `context` with the class itself.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
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

from branchlake_dagster.automation.attempts import histories
from branchlake_dagster.automation.backlog import Standing, Unconsumed
from branchlake_dagster.automation.backlog_report import SHOWN_PARTITIONS, standing_metadata
from branchlake_dagster.automation.consumers import ConsumingAsset, consumers
from branchlake_dagster.automation.in_flight import InFlight
from branchlake_dagster.automation.launch_decision import (
    STUCK,
    LaunchDecision,
    LaunchPolicy,
    approval_text,
    decide,
)
from branchlake_dagster.automation.partition_backlog import (
    PartitionBacklog,
    launch_decisions,
    partition_backlogs,
)
from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.incremental.affected_partitions import coverage
from branchlake_dagster.internals.dagster import RANGE_END_TAG, RANGE_START_TAG, CoercibleToAssetSelection
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.runs.approval import Approvals
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import AssetMetadata, RunTag
from branchlake_dagster.wording import counted, named


def incremental_sensor(
    name: str = "incremental_sensor",
    *,
    target: CoercibleToAssetSelection | None = None,
    min_rows: int = 1,
    min_files: int = 1,
    max_age_s: float = 3600.0,
    max_runs: int = 25,
    retries: int = 0,
    retry_delay_seconds: float = 60.0,
    minimum_interval_seconds: int = 5,
    default_status: DefaultSensorStatus = DefaultSensorStatus.RUNNING,
    lakehouse_key: str = "lakehouse",
) -> SensorDefinition:
    """A sensor that launches assets with `consumes(…)` when `main` has changes they have not consumed.

    An asset without partitions gets one run, a partitioned one a run for each partition that the change
    affects. With `from_start=True` a partition is launched when the one before it is published, or a run
    computes as many of them as the asset's backfill policy allows. What is being computed, or waits for its
    verdict, is not launched again. Without `retries` nothing is launched twice for the same state of its
    inputs, so a failed run waits for the next change or for somebody. What each consumer has left is shown
    on its page, as an observation whenever it has changed, with the first 20 partitions and why each of them
    is not launched.

    Args:
        name (str): The sensor's name. (default: `incremental_sensor`)
        target (Optional[CoercibleToAssetSelection]): Which assets. (default: all that consume changes)
        min_rows (int): Rows that must have come or gone. (default: 1)
        min_files (int): Files that they must be in. (default: 1)
        max_age_s (float): Seconds after which less is enough, too. (default: an hour)
        max_runs (int): The most runs that a tick launches; the next one goes on. (default: 25)
        retries (int): How often a run that failed is launched again for the same state of its inputs. A run
            whose step or check crashed counts, and one that was refused because `main` had an overlapping
            change. One that its checks blocked does not, as the same data would fail again, nor one that
            somebody canceled. (default: 0)
        retry_delay_seconds (float): Seconds from the end of a failed run to its first retry; each later retry
            waits twice as long as the one before it, up to a day. (default: 60)
        minimum_interval_seconds (int): Seconds between two ticks. Dagster looks for due sensors every 5 s.
            (default: 5)
        default_status (DefaultSensorStatus): Whether it starts as running. (default: RUNNING)
        lakehouse_key (str): The resource key of the lake. (default: `lakehouse`)

    Returns:
        SensorDefinition: Its ticks say what they have found.

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
    policy = LaunchPolicy(min_rows, min_files, max_age_s, retries, retry_delay_seconds)
    told: dict[AssetKey, object] = {}

    @sensor(
        name=name,
        required_resource_keys={lakehouse_key},
        asset_selection=selection,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Launches assets that consume changes, for the changes they have not consumed.",
        metadata={AssetMetadata.LAUNCH_POLICY: MetadataValue.json(asdict(policy))},
    )
    def incremental_sensor_(context: SensorEvaluationContext, **_: object) -> SensorResult:
        # `_`: called like a function, as in tests, Dagster passes the resources by name too.
        repository = context.repository_def
        assert repository is not None  # noqa: S101 - the daemon always evaluates within a code location
        lake: LakehouseResource = getattr(context.resources, lakehouse_key)
        graph, namespace = repository.asset_graph, lake.lakehouse.settings.default_namespace
        assets = list(consumers(graph, namespace, selection.resolve(graph, allow_missing=True)))
        head = lake.lakehouse.nessie.reference(MAIN).hash
        # Dagster shows the cursor as what the tick did.
        quiet = f"all is consumed at {head}, {_fingerprint(assets, context.instance)}"
        if context.cursor == quiet:
            return SensorResult(skip_reason=SkipReason("Nothing was published since."), cursor=context.cursor)
        now = datetime.now(UTC)
        look = _Look(lake, context.instance, policy, now, max_runs)
        for asset in assets:
            look.at(asset)
        events = [*look.observations(told)]
        for line in look.lines:
            context.log.info(line)
        return SensorResult(
            run_requests=look.requests,
            asset_events=events,
            skip_reason=None if look.requests else SkipReason(look.row()),
            cursor=quiet if look.quiet else look.row(),
        )

    return incremental_sensor_


def _fingerprint(assets: Iterable[ConsumingAsset], instance: DagsterInstance) -> str:
    """Another one when a consumer comes, or changes what it says, or gets a new partition."""
    found = [
        (
            asset.key.to_user_string(),
            repr(asset.consumer.declaration),
            coverage(asset.consumer.definition, instance=instance) if asset.consumer.definition else None,
        )
        for asset in assets
    ]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:12]


class _Look:
    """One tick: what each consumer has left, and the runs for it."""

    def __init__(
        self,
        lake: LakehouseResource,
        instance: DagsterInstance,
        policy: LaunchPolicy,
        now: datetime,
        most: int,
    ) -> None:
        self._lake = lake
        self._instance = instance
        self._policy = policy
        self._now = now
        self._most = most
        self._in_flight = InFlight(instance, now)
        self._approvals = Approvals(instance)
        self._held: set[str] = set()
        """The ids under which changes that wait for approval are approved."""
        self.requests: list[RunRequest] = []
        self.lines: list[str] = []
        self.found: dict[AssetKey, Unconsumed] = {}
        self._standings: dict[AssetKey, Standing] = {}
        self._decisions: dict[AssetKey, Sequence[tuple[str | None, LaunchDecision]]] = {}
        """About the first partitions of each consumer that have something left."""
        self.quiet = True
        """Whether no consumer has anything left."""

    def at(self, asset: ConsumingAsset) -> None:
        """Look at one consumer. What is wrong with it is told and stops no other."""
        standing = Standing(self._lake, asset.consumer, instance=self._instance, per_run=asset.per_run)
        name = asset.key.to_user_string()
        try:
            found = self.found[asset.key] = standing.unconsumed
            self.requests += islice(self._wanted(asset, standing, found), self._most - len(self.requests))
            self._standings[asset.key] = standing
            self._decisions[asset.key] = launch_decisions(
                asset.key,
                standing,
                self._instance,
                self._in_flight,
                self._policy,
                self._now,
                approvals=self._approvals,
                most=SHOWN_PARTITIONS,
            )
        except Exception as error:  # noqa: BLE001 - whatever a store or a table's metadata comes up with
            self._failed(name, error)
            return
        if found.any or found.trouble or found.waiting:
            self.quiet = False
            self.lines.append(f"{name}: {found.text()}")

    def _failed(self, name: str, error: Exception) -> None:
        self.quiet = False
        told = str(error) if isinstance(error, BranchlakeError) else f"{type(error).__name__}: {error}"
        self.lines.append(f"{name}: {told}")

    def observations(self, told: dict[AssetKey, object]) -> Iterator[AssetObservation]:
        """What the pages of the consumers show anew; `told` is what they were told last, and is updated.

        Only what is left and where runs have failed counts as new, so that a run that starts or ends well
        adds no event. What each partition has left is counted for these observations alone.
        """
        for key, found in self.found.items():
            decisions = self._decisions.get(key, ())
            stuck = [(one, its.state, its.run_id) for one, its in decisions if its.state in STUCK]
            if told.get(key) == (shown := (found, stuck)):
                continue
            told[key] = shown
            partitions: Sequence[PartitionBacklog] = ()
            count: int | None = None
            try:
                if standing := self._standings.get(key):
                    partitions = partition_backlogs(standing, decisions)
                    if standing.by_partition and not (found.trouble or found.waiting):
                        count = len(standing.partitions)
            except Exception as error:  # noqa: BLE001 - its page says so; other assets go on
                self._failed(key.to_user_string(), error)
            metadata = standing_metadata(found, self._now, partitions, count, self._policy)
            yield AssetObservation(key, metadata=metadata)

    def _wanted(self, asset: ConsumingAsset, standing: Standing, found: Unconsumed) -> Iterator[RunRequest]:
        """The runs that are due, by partition. One that is not holds up those that are computed from it.

        What waits for approval is launched once that is given.
        """
        if not self._policy.reached(found, self._now) or self._in_flight.whole(asset.key):
            return
        busy = self._in_flight.partitions(asset.key)
        runs: list[tuple[str, ...]] = [()]
        if standing.by_partition:
            runs = [one.partitions for one in standing.batches if busy.isdisjoint(one.partitions)]
        partitions: list[str | None] = [None]
        if standing.by_partition:
            partitions = [key for one in runs for key in one]
        held = standing.held(partitions, self._approvals)
        self._held.update(name for names in held.values() for name in names)
        runs = [one for one in runs if held.keys().isdisjoint(one or (None,))]
        keys = (standing.key(one[0] if one else None) for one in runs)
        for run, history in zip(runs, histories(self._instance, keys, self._policy.retries), strict=True):
            decision = decide(found, history, None, self._policy, self._now)
            if decision.run_key is not None:
                tags = {RunTag.HELD_UNTIL_APPROVED: "true"} | (
                    {RunTag.RETRY: str(decision.retry)} if decision.retry else {}
                )
                if len(run) > 1:
                    tags |= {RANGE_START_TAG: run[0], RANGE_END_TAG: run[-1]}
                yield RunRequest(
                    decision.run_key,
                    asset_selection=[asset.key],
                    partition_key=run[0] if len(run) == 1 else None,
                    tags=tags,
                )

    def row(self) -> str:
        """The tick in a line."""
        left = [key.to_user_string() for key, found in self.found.items() if found.any]
        if not left:
            return f"{counted(len(self.found), 'consumer')} looked at, nothing to consume"
        started = f", {counted(len(self.requests), 'run')} launched" if self.requests else ""
        waits = f"; a part of it {approval_text(sorted(self._held))}" if self._held else ""
        return f"change for {named('asset', left[:5])}{started}{waits}"


@dataclass(frozen=True)
class DeclaredSensor:
    """An incremental sensor of a code location, and when it launches."""

    name: str
    policy: LaunchPolicy
    running_by_default: bool


def declared_sensors(repository: RepositoryDefinition) -> dict[AssetKey, DeclaredSensor]:
    """The incremental sensor of each asset that has one; with several of them, the first by name."""
    graph = repository.asset_graph
    found: dict[AssetKey, DeclaredSensor] = {}
    for one in sorted(repository.sensor_defs, key=lambda sensor: sensor.name):
        stored: Any = one.metadata.get(AssetMetadata.LAUNCH_POLICY)
        if stored is None or one.asset_selection is None:
            continue
        running = one.default_status is DefaultSensorStatus.RUNNING
        its = DeclaredSensor(one.name, LaunchPolicy(**stored.value), running)
        for key in one.asset_selection.resolve(graph, allow_missing=True):
            found.setdefault(key, its)
    return found
