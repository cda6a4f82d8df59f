"""The sensor that launches consumers when there is published change that they have not consumed.

No postponed annotations here: Dagster compares the annotation of `context` with the class itself.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice

from dagster import (
    AssetKey,
    AssetObservation,
    AssetSelection,
    DagsterInstance,
    DefaultSensorStatus,
    RunRequest,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    sensor,
)

from branchlake_dagster.branching.consuming.affected import coverage
from branchlake_dagster.branching.resources.lakehouse_resource import LakehouseResource
from branchlake_dagster.errors import BranchlakeError
from branchlake_dagster.incremental.backlog import Standing, Unconsumed
from branchlake_dagster.incremental.consumers import ConsumingAsset, consumers
from branchlake_dagster.incremental.in_flight import InFlight
from branchlake_dagster.incremental.report import standing_metadata
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.library_internals.dagster import RUN_KEY_TAG, CoercibleToAssetSelection
from branchlake_dagster.wording import counted, named


@dataclass(frozen=True)
class Threshold:
    """When a change is worth a run: enough rows or files, or old enough."""

    rows: int
    files: int
    age_s: float

    def reached(self, found: Unconsumed, now: datetime) -> bool:
        """Whether it is."""
        if not found.any:
            return False
        enough = found.rows >= self.rows and found.files >= self.files
        return found.whole or enough or found.age_s(now) >= self.age_s


def incremental_sensor(
    name: str = "incremental_sensor",
    *,
    target: CoercibleToAssetSelection | None = None,
    min_rows: int = 1,
    min_files: int = 1,
    max_age_s: float = 3600.0,
    max_runs: int = 25,
    minimum_interval_seconds: int = 5,
    default_status: DefaultSensorStatus = DefaultSensorStatus.RUNNING,
    lakehouse_key: str = "lakehouse",
) -> SensorDefinition:
    """A sensor that launches assets with `consumes(…)` when `main` has changes they have not consumed.

    An asset without partitions gets one run, a partitioned one a run for each partition that the change
    affects. What is being computed, or waits for its verdict, is not launched again; and nothing is launched
    twice for the same state of its inputs, so a failed run waits for the next change or for somebody. What
    each consumer has left is shown on its page, as an observation whenever it has changed.

    Args:
        name (str): The sensor's name. (default: `incremental_sensor`)
        target (Optional[CoercibleToAssetSelection]): Which assets. (default: all that consume changes)
        min_rows (int): Rows that must have come or gone. (default: 1)
        min_files (int): Files that they must be in. (default: 1)
        max_age_s (float): Seconds after which less is enough, too. (default: an hour)
        max_runs (int): The most runs that a tick launches; the next one goes on. (default: 25)
        minimum_interval_seconds (int): Seconds between two ticks. Dagster looks for due sensors every 5 s.
            (default: 5)
        default_status (DefaultSensorStatus): Whether it starts as running. (default: RUNNING)
        lakehouse_key (str): The resource key of the lake. (default: `lakehouse`)

    Returns:
        SensorDefinition: Its ticks say what they have found.

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
    threshold = Threshold(min_rows, min_files, max_age_s)
    told: dict[AssetKey, Unconsumed] = {}

    @sensor(
        name=name,
        required_resource_keys={lakehouse_key},
        asset_selection=selection,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Launches assets that consume changes, for the changes they have not consumed.",
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
        look = _Look(lake, context.instance, threshold, now, max_runs)
        for asset in assets:
            look.at(asset)
        for line in look.lines:
            context.log.info(line)
        events = [
            AssetObservation(key, metadata=standing_metadata(found, now))
            for key, found in look.found.items()
            if told.get(key) != found
        ]
        told.update(look.found)
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
        threshold: Threshold,
        now: datetime,
        most: int,
    ) -> None:
        self._lake = lake
        self._instance = instance
        self._threshold = threshold
        self._now = now
        self._most = most
        self._in_flight = InFlight(instance, now)
        self.requests: list[RunRequest] = []
        self.lines: list[str] = []
        self.found: dict[AssetKey, Unconsumed] = {}
        self.quiet = True
        """Whether no consumer has anything left."""

    def at(self, asset: ConsumingAsset) -> None:
        """Look at one consumer. What is wrong with it is told and stops no other."""
        standing = Standing(self._lake, asset.consumer, instance=self._instance)
        name = asset.key.to_user_string()
        try:
            found = self.found[asset.key] = standing.unconsumed
            wanted = self._not_launched(self._wanted(asset, standing, found))
            self.requests += islice(wanted, self._most - len(self.requests))
        except Exception as error:  # noqa: BLE001 - whatever a store or a table's metadata comes up with
            self.quiet = False
            told = str(error) if isinstance(error, BranchlakeError) else f"{type(error).__name__}: {error}"
            self.lines.append(f"{name}: {told}")
            return
        if found.any or found.trouble or found.waiting:
            self.quiet = False
            self.lines.append(f"{name}: {found.text()}")

    def _not_launched(self, requests: Iterable[RunRequest]) -> Iterator[RunRequest]:
        """Without those that a run was made for: Dagster drops them, and the next in line would wait."""
        rest = iter(requests)
        while part := list(islice(rest, _CHUNK)):
            runs = self._instance.get_runs(
                RunsFilter(tags={RUN_KEY_TAG: [one.run_key or "" for one in part]})
            )
            known = {run.tags[RUN_KEY_TAG] for run in runs}
            yield from (one for one in part if one.run_key not in known)

    def _wanted(self, asset: ConsumingAsset, standing: Standing, found: Unconsumed) -> Iterator[RunRequest]:
        if not self._threshold.reached(found, self._now) or self._in_flight.whole(asset.key):
            return
        if not asset.consumer.by_partition:
            yield _request(asset.key, standing.key())
            return
        busy = self._in_flight.partitions(asset.key)
        for partition in standing.partitions:
            if partition not in busy:
                yield _request(asset.key, standing.key(partition), partition)

    def row(self) -> str:
        """The tick in a line."""
        left = [key.to_user_string() for key, found in self.found.items() if found.any]
        if not left:
            return f"{counted(len(self.found), 'consumer')} looked at, nothing to consume"
        started = f", {counted(len(self.requests), 'run')} launched" if self.requests else ""
        return f"change for {named('asset', left[:5])}{started}"


_CHUNK = 200
"""Keys in one query."""


def _request(key: AssetKey, state: str, partition: str | None = None) -> RunRequest:
    return RunRequest(state, asset_selection=[key], partition_key=partition)
