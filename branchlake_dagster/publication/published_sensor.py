"""A sensor that reads `main`'s log and requests a run per publication, in the order of the log.

`on_publication()` serves several publications with one run. This sensor requests one run for each publication
and misses none. It reads the lake, so it can also follow assets of other code locations.

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
from branchlake_dagster.publication.ledger import Publication
from branchlake_dagster.publication.new_publications import load_branch_partitions, read_new_publications
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.stored_names import RunTag
from branchlake_dagster.tables.specification import format_table_name, table_identifier
from branchlake_dagster.wording import format_count


@dataclass(frozen=True)
class PublishedAssets:
    """A publication that changed watched assets, as the `request` of a `published_sensor` gets it.

    Attributes:
        publication (Publication): Its `hash`, `run_id`, `publication_id` and `tables` (dotted names).
        partitions (Mapping[AssetKey, Set[str | None]]): The published partitions of each asset; None stands
            for an asset without partitions. A set is empty if this Dagster instance does not have the
            published run.

    Examples:
        .. code-block:: python

            def request(published: PublishedAssets) -> dg.RunRequest | None:
                days = published.partitions[dg.AssetKey(["shop", "prices"])]
                return dg.RunRequest(tags={"days": ",".join(sorted(day for day in days if day))})
    """

    publication: Publication
    partitions: Mapping[AssetKey, Set[str | None]]


_RequestBuilder = Callable[[PublishedAssets], Sequence[RunRequest] | str]
"""Returns the run requests for a publication, or a message why there are none."""


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
    """A sensor that launches a job for each publication that changed a table of its assets.

    The sensor reads `main`'s log in order. It misses no publication and merges none. A partitioned job gets
    one run per published partition, if all `assets` have exactly the same partitions as the job; otherwise
    pass `request`. The first tick starts at the current end of the log.

    Args:
        name (str): The sensor's name.
        assets (Sequence[CoercibleToAssetKey] | AssetSelection): Asset keys, also of other code locations, or
            a selection of this code location.
        job (Optional[ExecutableDefinition]): The job to launch.
        jobs (Optional[Sequence[ExecutableDefinition]]): Several jobs, of which `request` chooses one.
        request (Optional[Callable[[PublishedAssets], RunRequest | SkipReason | None]]): Called with each
            publication; returns what to launch. A request without a `run_key` gets the publication's id, so
            that nothing is launched twice. (default: a run of `job`)
        minimum_interval_seconds (int): Seconds between two ticks. Dagster looks for due sensors every 5 s,
            so 3 s means every time. (default: 3)
        default_status (DefaultSensorStatus): Whether the sensor starts as running. (default: STOPPED)
        description (Optional[str]): The description in Dagster's UI.
        lakehouse_key (str): The resource key of the lake whose log is read. (default: `lakehouse`)

    Returns:
        SensorDefinition: Its cursor is the last commit that it has read.

    Raises:
        ConfigurationError: The sensor cannot know what to launch. Raised here or in each tick.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import published_sensor

            report_job = dg.define_asset_job("report_job", selection="report")
            after_prices = published_sensor("after_prices", assets=[["shop", "prices"]], job=report_job)
    """
    if not isinstance(assets, AssetSelection) and not assets:
        raise ConfigurationError(
            f"The sensor {name} watches no assets.",
            hint="Pass at least one asset key: assets=[…].",
            reason="no_assets",
            subject=name,
        )
    if request is None and job is None:
        raise ConfigurationError(
            f"The sensor {name} has no job to launch.",
            hint="Pass job=…, or request=… and jobs=[…].",
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
        # `_`: when a test calls the sensor like a function, Dagster also passes the resources by name.
        repository = context.repository_def
        assert repository is not None  # noqa: S101 - the daemon always evaluates within a code location
        resource: LakehouseResource = getattr(context.resources, lakehouse_key)
        lake = resource.lakehouse
        keys = _resolve_keys(assets, repository)
        build_requests = (
            _user_request_builder(request)
            if request
            else _job_request_builder(job, keys, repository, context.instance)
        )
        tables = {
            format_table_name(table_identifier(key, lake.settings.default_namespace)): key for key in keys
        }
        log_batch = read_new_publications(lake.nessie, context.cursor)
        requests: list[RunRequest] = []
        messages = [log_batch.note] if log_batch.note else []
        for publication in log_batch.publications:
            asset_keys = [tables[table] for table in publication.tables if table in tables]
            if asset_keys:
                partition_keys = load_branch_partitions(context.instance, publication.branch)
                published = PublishedAssets(
                    publication, {key: partition_keys.get(key, frozenset()) for key in asset_keys}
                )
                result = build_requests(published)
                requests += [] if isinstance(result, str) else result
                messages += [result] if isinstance(result, str) else []
        for line in messages:
            context.log.info(line)
        reason = " ".join(messages) or _format_nothing_new(len(log_batch.entries))
        return SensorResult(
            run_requests=requests,
            cursor=log_batch.cursor,
            skip_reason=None if requests else SkipReason(reason),
        )

    return follow


def _format_nothing_new(commits: int) -> str:
    return f"{format_count(commits, 'commit')} on main since the last tick, none of them for these assets."


def _resolve_keys(
    assets: Sequence[CoercibleToAssetKey] | AssetSelection, repository: RepositoryDefinition
) -> Sequence[AssetKey]:
    if isinstance(assets, AssetSelection):
        return sorted(assets.resolve(repository.asset_graph))
    return [AssetKey.from_coercible(asset) for asset in assets]


# -- what to launch ------------------------------------------------------------------------------------


def _user_request_builder(
    request: Callable[[PublishedAssets], RunRequest | SkipReason | None],
) -> _RequestBuilder:
    """Wrap the user's function: its requests get a run key, and its skip reasons become messages."""

    def build_requests(published: PublishedAssets) -> Sequence[RunRequest] | str:
        result = request(published)
        if isinstance(result, RunRequest):
            key = result.run_key or published.publication.publication_id
            return [result.with_replaced_attrs(run_key=key)]
        return (
            result.skip_message if result else None
        ) or f"No request for the publication of run {published.publication.run_id}."

    return build_requests


def _job_request_builder(
    job: ExecutableDefinition | None,
    keys: Sequence[AssetKey],
    repository: RepositoryDefinition,
    instance: DagsterInstance,
) -> _RequestBuilder:
    """Build the requests for `job`: one for each publication.

    A partitioned job gets one request for each published partition that still exists.
    """
    assert job is not None  # noqa: S101 - a sensor without `request` has a job
    partitions, graph = repository.get_job(job.name).partitions_def, repository.asset_graph
    differing_assets = [
        key.to_user_string()
        for key in keys
        if not graph.has(key) or graph.get(key).partitions_def != partitions
    ]
    if partitions is not None and differing_assets:
        raise ConfigurationError(
            f"The job {job.name} has other partitions than {', '.join(differing_assets)}.",
            hint="Choose what to launch with published_sensor(request=…). For an asset of another code "
            "location, an AssetSpec can declare the partitions.",
            reason="other_partitions",
            subject=", ".join(differing_assets),
        )

    def build_requests(published: PublishedAssets) -> Sequence[RunRequest] | str:
        publication = published.publication
        tags = {RunTag.AFTER_PUBLICATION: publication.hash, RunTag.AFTER_RUN: publication.run_id}
        if partitions is None:
            return [RunRequest(publication.publication_id, job_name=job.name, tags=tags)]
        published_keys = {key for keys in published.partitions.values() for key in keys if key is not None}
        with partition_loading_context(dynamic_partitions_store=instance):
            existing_keys = partitions.filter_valid_partition_keys(published_keys)
        return [
            RunRequest(f"{publication.publication_id}:{key}", job_name=job.name, partition_key=key, tags=tags)
            for key in sorted(existing_keys)
        ] or f"No partition to launch after run {publication.run_id}: its partitions are unknown or deleted."

    return build_requests
