"""A sensor that reads `main`'s log and requests a run per publication, in the order of the log.

Where `on_publication()` asks "is there anything new?" and serves several publications with one run, this
one misses none and merges none. It also follows assets of other code locations, because it reads the lake.

No postponed annotations here: Dagster compares the annotation of `context` with the class itself.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from dagster import (
    AssetKey,
    AssetSelection,
    DagsterInstance,
    DefaultSensorStatus,
    RepositoryDefinition,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    partition_loading_context,
    sensor,
)

from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.internals.dagster import CoercibleToAssetKey, ExecutableDefinition
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import ReferenceNotFound
from branchlake_dagster.nessie.model import LogEntry
from branchlake_dagster.publication.ledger import Publication, publications_in
from branchlake_dagster.publication.written_partitions import written_on
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.specification import identifier_of, table_name
from branchlake_dagster.wording import counted

COMMITS_PER_TICK = 100
"""Dagster ends an evaluation after 60 s; the next tick goes on where this one stopped."""


@dataclass(frozen=True)
class PublishedAssets:
    """A publication that touched watched assets, as the `request` of a `published_sensor` gets it.

    Attributes:
        publication (Publication): Its `hash`, `run_id`, `publication_id` and `tables` (dotted names).
        partitions (Mapping[AssetKey, Set[str | None]]): By asset the partitions that were published; None
            stands for an asset without partitions. A set is empty when this Dagster instance does not know
            the run that was published.

    Examples:
        .. code-block:: python

            def request(published: PublishedAssets) -> dg.RunRequest | None:
                days = published.partitions[dg.AssetKey(["shop", "prices"])]
                return dg.RunRequest(tags={"days": ",".join(sorted(day for day in days if day))})
    """

    publication: Publication
    partitions: Mapping[AssetKey, Set[str | None]]


_Answer = Callable[[PublishedAssets], Sequence[RunRequest] | str]
"""The requests for a publication, or why there are none."""


def published_sensor(
    name: str,
    *,
    assets: Sequence[CoercibleToAssetKey] | AssetSelection,
    job: ExecutableDefinition | None = None,
    jobs: Sequence[ExecutableDefinition] | None = None,
    request: Callable[[PublishedAssets], RunRequest | SkipReason | None] | None = None,
    minimum_interval_seconds: int = 3,
    default_status: DefaultSensorStatus = DefaultSensorStatus.STOPPED,
    description: str | None = None,
    lakehouse_key: str = "lakehouse",
) -> SensorDefinition:
    """A sensor that launches a job for each publication that touched a table of its assets.

    It reads `main`'s log in order, misses no publication and merges none. A partitioned job gets one run per
    published partition, if all `assets` have its very partitions; otherwise give `request`. The first tick
    starts at the present end of the log.

    Args:
        name (str): The sensor's name.
        assets (Sequence[CoercibleToAssetKey] | AssetSelection): Keys, also of other code locations, or a
            selection of this one's.
        job (Optional[ExecutableDefinition]): What is launched.
        jobs (Optional[Sequence[ExecutableDefinition]]): Several, of which `request` chooses one.
        request (Optional[Callable[[PublishedAssets], RunRequest | SkipReason | None]]): Called with each
            publication, says what to launch. A request without a `run_key` gets the publication's id, so
            that nothing is launched twice. (default: a run of `job`)
        minimum_interval_seconds (int): Seconds between two ticks. Dagster looks for due sensors every 5 s, so
            3 s means at every look. (default: 3)
        default_status (DefaultSensorStatus): Whether it starts as running. (default: STOPPED)
        description (Optional[str]): For the UI.
        lakehouse_key (str): The resource key of the lake whose log it reads. (default: `lakehouse`)

    Returns:
        SensorDefinition: With a cursor, the last commit that it has read.

    Raises:
        ConfigurationError: Here or in each tick: it cannot know what to launch.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import published_sensor

            report_job = dg.define_asset_job("report_job", selection="report")
            after_prices = published_sensor("after_prices", assets=[["shop", "prices"]], job=report_job)
    """
    if not isinstance(assets, AssetSelection) and not assets:
        raise ConfigurationError(
            f"The sensor {name} watches no asset.",
            hint="Name some: assets=[…].",
            reason="no_assets",
            subject=name,
        )
    if request is None and job is None:
        raise ConfigurationError(
            f"The sensor {name} does not know what to launch.",
            hint="Give it a job, or request and jobs.",
            reason="no_job",
            subject=name,
        )

    @sensor(
        name=name,
        job=job,
        jobs=jobs,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description=description or "Launches a run for each publication of the watched assets.",
        required_resource_keys={lakehouse_key},
    )
    def follow(context: SensorEvaluationContext, **_: object) -> SensorResult:
        # `_`: called like a function, as in tests, Dagster passes the resources by name too.
        repository = context.repository_def
        assert repository is not None  # noqa: S101 - the daemon always evaluates within a code location
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        lake = resource.lakehouse
        keys = _keys(assets, repository)
        answer = _answer_of(request) if request else _launch(job, keys, repository, context.instance)
        tables = {table_name(identifier_of(key, lake.settings.default_namespace)): key for key in keys}
        step = _read(lake.nessie, context.cursor)
        requests: list[RunRequest] = []
        told = [step.note] if step.note else []
        for publication in (one for entry in step.entries for one in publications_in(entry)):
            touched = [tables[table] for table in publication.tables if table in tables]
            if touched:
                written = written_on(context.instance, publication.branch)
                event = PublishedAssets(publication, {key: written.get(key, frozenset()) for key in touched})
                found = answer(event)
                requests += [] if isinstance(found, str) else found
                told += [found] if isinstance(found, str) else []
        for line in told:
            context.log.info(line)
        why = " ".join(told) or _nothing(len(step.entries))
        return SensorResult(
            run_requests=requests, cursor=step.cursor, skip_reason=None if requests else SkipReason(why)
        )

    return follow


def _nothing(commits: int) -> str:
    return f"{counted(commits, 'commit')} on main since, none for these assets."


def _keys(
    assets: Sequence[CoercibleToAssetKey] | AssetSelection, repository: RepositoryDefinition
) -> Sequence[AssetKey]:
    if isinstance(assets, AssetSelection):
        return sorted(assets.resolve(repository.asset_graph))
    return [AssetKey.from_coercible(asset) for asset in assets]


# -- main's log ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """Commits in the order they were made, the cursor after them, and what is odd about it."""

    entries: Sequence[LogEntry]
    cursor: str
    note: str = ""


def _read(client: NessieClient, cursor: str | None) -> _Step:
    head = client.reference(MAIN)
    if cursor is None:
        return _Step((), head.hash, f"Starts at main's present commit {head.hash[:12]}.")
    if cursor == head.hash:
        return _Step((), cursor)
    try:
        entries = list(client.log(head.pinned, since=cursor))
    except ReferenceNotFound:
        return _Step(
            (),
            head.hash,
            f"main's log no longer holds commit {cursor[:12]}: its history was rewritten. What was published "
            f"meanwhile is not known. Starts anew at {head.hash[:12]}.",
        )
    taken = entries[::-1][:COMMITS_PER_TICK]
    return _Step(taken, taken[-1].commit.hash if taken else cursor)


# -- what to launch ------------------------------------------------------------------------------------


def _answer_of(request: Callable[[PublishedAssets], RunRequest | SkipReason | None]) -> _Answer:
    """The user's function, its request with a run key."""

    def answer(event: PublishedAssets) -> Sequence[RunRequest] | str:
        found = request(event)
        if isinstance(found, RunRequest):
            key = found.run_key or event.publication.publication_id
            return [found.with_replaced_attrs(run_key=key)]
        return (found.skip_message if found else None) or f"Nothing after run {event.publication.run_id}."

    return answer


def _launch(
    job: ExecutableDefinition | None,
    keys: Sequence[AssetKey],
    repository: RepositoryDefinition,
    instance: DagsterInstance,
) -> _Answer:
    """A request for the job; for a partitioned one a request per published partition that still exists."""
    assert job is not None  # noqa: S101 - a sensor without `request` has one
    partitions, graph = repository.get_job(job.name).partitions_def, repository.asset_graph
    others = [
        key.to_user_string()
        for key in keys
        if not graph.has(key) or graph.get(key).partitions_def != partitions
    ]
    if partitions is not None and others:
        raise ConfigurationError(
            f"The job {job.name} is partitioned otherwise than {', '.join(others)}.",
            hint="Say what to launch with published_sensor(request=…). Of an asset of another code location "
            "an AssetSpec can tell the partitions.",
            reason="other_partitions",
            subject=", ".join(others),
        )

    def answer(event: PublishedAssets) -> Sequence[RunRequest] | str:
        one = event.publication
        tags = {RunTag.AFTER_PUBLICATION: one.hash, RunTag.AFTER_RUN: one.run_id}
        if partitions is None:
            return [RunRequest(one.publication_id, job_name=job.name, tags=tags)]
        wanted = {key for keys in event.partitions.values() for key in keys if key is not None}
        with partition_loading_context(dynamic_partitions_store=instance):
            there = partitions.filter_valid_partition_keys(wanted)
        return [
            RunRequest(f"{one.publication_id}:{key}", job_name=job.name, partition_key=key, tags=tags)
            for key in sorted(there)
        ] or f"No partition to launch after run {one.run_id}: not known here, or deleted since."

    return answer
