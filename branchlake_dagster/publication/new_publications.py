"""Reads the publications since a cursor, and provides the sensor that launches runs for them.

Sensors and automation conditions read through a `PublicationReader`. It returns each publication once. There
are two readers, because there are two records of publications:

- `MainLogReader` reads `main`'s log. `published_sensor` uses it, because it must miss no publication, also of
  other code locations and Dagster instances.
- `ReportReader` reads the observations that the publisher reports for an asset. Conditions use it: Dagster
  passes no lake to a condition, and runs without a branch are reported, but are not in the ledger.

`on_publication()` serves several publications with one run. `published_sensor` requests one run for each
publication, in the order of the log.

No postponed annotations here: Dagster compares the annotation of `context` with the class itself.
"""

import json
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, Protocol, Self, TypeVar

from dagster import (
    AssetKey,
    AssetRecordsFilter,
    AssetSelection,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DefaultSensorStatus,
    MetadataValue,
    RepositoryDefinition,
    RunRequest,
    RunsFilter,
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
from branchlake_dagster.publication.ledger import (
    Publication,
    is_namespace_change,
    list_undone_runs,
    parse_publications,
)
from branchlake_dagster.runs.branch_owner import load_runs_on_branch
from branchlake_dagster.runs.lakehouse_resource import LakehouseResource
from branchlake_dagster.runs.run_branch import run_id_of_branch
from branchlake_dagster.runs.run_tags import find_run_location
from branchlake_dagster.stored_names import AssetMetadata, EventMetadata, RunTag
from branchlake_dagster.tables.specification import format_table_name, table_identifier
from branchlake_dagster.wording import format_count, format_names

_PublicationT = TypeVar("_PublicationT", covariant=True)


@dataclass(frozen=True)
class NewPublications(Generic[_PublicationT]):
    """The publications since a cursor, oldest first, and the cursor after them.

    `records_read` is the number of commits or reports that were read, also those without a new publication.
    `note` explains why reading did not start at the cursor, or which records are damaged; it is empty
    otherwise.
    """

    publications: Sequence[_PublicationT]
    cursor: str
    records_read: int = 0
    note: str = ""


class PublicationReader(Protocol[_PublicationT]):
    """Reads the publications of some assets from one record of publications."""

    def read_since(self, cursor: str | None) -> NewPublications[_PublicationT]:
        """Read the publications after `cursor`, each once, even if it was recorded repeatedly.

        With None as cursor, nothing earlier is returned: `MainLogReader` starts at the current head of
        `main`, `ReportReader` at its `start_id`. The cursor is text for Dagster to store. The cost depends
        only on the records since the cursor, not on the length of the history.
        """


# -- partitions on a branch ------------------------------------------------------------------------------

_CHUNK = 500
"""The number of values in one query; SQLite allows at most 999."""

PartitionsByAsset = Mapping[AssetKey, Set[str | None]]
"""Partition keys by asset; None stands for an asset without partitions."""


def load_branch_partitions(instance: DagsterInstance, branch: str) -> PartitionsByAsset:
    """Load the partitions on a branch, written by the run that opened it and by its retries.

    The result is empty if this instance does not have the run: another Dagster may write to the lake.
    """
    return _load_partitions(instance, load_runs_on_branch(instance, branch))


def load_run_partitions(instance: DagsterInstance, run: DagsterRun) -> PartitionsByAsset:
    """Load the partitions that this run materialized.

    If the run continued the branch of another run, the result has all partitions on that branch, also those
    of the earlier runs.
    """
    branch_name = _continued_branch(run)
    return load_branch_partitions(instance, branch_name) if branch_name else _load_partitions(instance, [run])


def load_asset_partitions(
    instance: DagsterInstance, branches: Iterable[str], key: AssetKey
) -> Mapping[str, Set[str | None]]:
    """Load the partitions of asset `key` on each branch, by branch name.

    Branches without partitions of the asset are left out. Costs a query per 500 branches, and one for each
    run that may have written the asset.
    """
    partition_keys: dict[str, Set[str | None]] = {}
    branches_by_run = {run_id_of_branch(branch): branch for branch in branches}
    run_ids = iter(branches_by_run)
    while chunk := list(islice(run_ids, _CHUNK)):
        for run in instance.get_runs(filters=RunsFilter(run_ids=chunk)):
            # A run of a whole job has no selection. The selection of a retry is smaller than its branch.
            may_have = not run.asset_selection or key in run.asset_selection or _continued_branch(run)
            if may_have and (run_partitions := load_run_partitions(instance, run).get(key)):
                partition_keys[branches_by_run[run.run_id]] = run_partitions
    return partition_keys


def _continued_branch(run: DagsterRun) -> str | None:
    """Return the branch of a retry that continues another run's work; None for other runs. Costs no query."""
    run_location = find_run_location(run.tags, run.run_id)
    return run_location.branch if run_location and run_location.continues else None


def _load_partitions(instance: DagsterInstance, runs: Iterable[DagsterRun]) -> PartitionsByAsset:
    partition_keys: dict[AssetKey, set[str | None]] = defaultdict(set)
    for run in runs:
        run_partitions = instance.event_log_storage.get_asset_partitions_for_run(
            run.run_id, DagsterEventType.ASSET_MATERIALIZATION
        )
        for key, partitions in run_partitions.items():
            partition_keys[key] |= partitions
    return partition_keys


# -- main's log ----------------------------------------------------------------------------------------

_COMMIT_HASH = re.compile(r"[0-9a-f]{16,64}")
COMMITS_PER_TICK = 100
"""The most commits of `main` that one tick reads; the next tick continues after them.

Dagster ends an evaluation after 60 s.
"""


@dataclass(frozen=True)
class PublishedAssets:
    """A publication that changed watched assets, as the `request` of a `published_sensor` gets it.

    The undo of publications changes the assets too. Its `publication` has the commit of the undo as `hash`,
    and the undone run as `run_id`.

    Attributes:
        publication (Publication): Its `hash`, `run_id`, `publication_id` and `tables` (dotted names).
        partitions (Mapping[AssetKey, Set[str | None]]): The published partitions of each asset; None stands
            for an asset without partitions. A set is empty if this Dagster instance does not have the
            published run.
        is_undo (bool): Whether the commit undid publications of these partitions.

    Examples:
        .. code-block:: python

            def request(published: PublishedAssets) -> dg.RunRequest | None:
                days = published.partitions[dg.AssetKey(["shop", "prices"])]
                return dg.RunRequest(tags={"days": ",".join(sorted(day for day in days if day))})
    """

    publication: Publication
    partitions: Mapping[AssetKey, Set[str | None]]
    is_undo: bool = False


@dataclass(frozen=True)
class MainLogReader:
    """Reads `main`'s log. The cursor is the hash of the last commit that was read.

    `keys_by_table` are the assets whose publications are returned, by the dotted names of their tables. At
    most `COMMITS_PER_TICK` commits are returned at once. If `main`'s history was rewritten, the reader starts
    again at the present, and the note says so.
    """

    client: NessieClient
    instance: DagsterInstance
    keys_by_table: Mapping[str, AssetKey]

    def read_since(self, cursor: str | None) -> NewPublications[PublishedAssets]:
        """Read the commits on `main` after the commit `cursor`, and the partitions of their publications.

        Undos of publications are included. Commits that changed none of the watched tables are left out. With
        None as cursor, the result has no publications and the current head of `main` as its cursor.
        """
        head = self.client.reference(MAIN)
        if cursor is None:
            note = f"The sensor starts at main's current commit {head.hash[:12]}."
            return NewPublications((), head.hash, note=note)
        if cursor == head.hash:
            return NewPublications((), cursor)
        if not _COMMIT_HASH.fullmatch(cursor):
            note = f"The stored cursor is not a commit. The sensor starts again at {head.hash[:12]}."
            return NewPublications((), head.hash, note=note)
        try:
            # The log yields the newest commit first; only the oldest commits are kept.
            entries = deque(self.client.log(head.pinned_ref, since=cursor), maxlen=COMMITS_PER_TICK)
        except ReferenceNotFound:
            note = (
                f"main's log no longer holds commit {cursor[:12]}: its history was rewritten. Publications "
                f"in between are unknown. The sensor starts again at {head.hash[:12]}."
            )
            return NewPublications((), head.hash, note=note)
        recorded_publications: list[Publication] = []
        publications: list[PublishedAssets] = []
        for entry in reversed(entries):
            for publication in parse_publications(entry):
                recorded_publications.append(publication)
                if keys := self._watched_keys(publication):
                    publications.append(self._load_assets(publication, keys))
            if run_ids := list_undone_runs(entry):
                undo = self._load_undo(entry, run_ids)
                if keys := self._watched_keys(undo):
                    publications.append(self._load_undone_assets(undo, run_ids, keys))
        note = _describe_damage(recorded_publications)
        return NewPublications(
            publications, entries[0].commit.hash if entries else cursor, len(entries), note
        )

    def _watched_keys(self, publication: Publication) -> list[AssetKey]:
        return [self.keys_by_table[table] for table in publication.tables if table in self.keys_by_table]

    def _load_assets(self, publication: Publication, keys: Sequence[AssetKey]) -> PublishedAssets:
        partitions = load_branch_partitions(self.instance, publication.branch)
        return PublishedAssets(publication, {key: partitions.get(key, frozenset()) for key in keys})

    def _load_undo(self, entry: LogEntry, run_ids: Sequence[str]) -> Publication:
        """Return the commit of an undo as a publication. Its name of a branch is unique, but no branch."""
        commit = entry.commit
        changes = self.client.diff(f"@{commit.parent_hashes[0]}", f"@{commit.hash}")
        tables = tuple(sorted(change.key.name for change in changes if not is_namespace_change(change)))
        return Publication(
            branch=f"undo-{commit.hash}",
            run_id=run_ids[0],
            root_run_id=run_ids[0],
            verdict="",
            base_hash=commit.parent_hashes[0],
            tables=tables,
            hash=commit.hash,
            time=commit.commit_time,
        )

    def _load_undone_assets(
        self, undo: Publication, run_ids: Sequence[str], keys: Sequence[AssetKey]
    ) -> PublishedAssets:
        partitions: dict[AssetKey, Set[str | None]] = dict.fromkeys(keys, frozenset())
        for run in self.instance.get_runs(filters=RunsFilter(run_ids=list(run_ids))):
            run_partitions = load_run_partitions(self.instance, run)
            for key in keys:
                partitions[key] = partitions[key] | run_partitions.get(key, frozenset())
        return PublishedAssets(undo, partitions, is_undo=True)


def _describe_damage(publications: Sequence[Publication]) -> str:
    """Return a sentence about the commits whose records cannot be read whole; empty if there are none."""
    damaged_commits = dict.fromkeys(
        publication.hash[:12] for publication in publications if publication.damaged_properties
    )
    return (
        f"main's {format_names('commit', list(damaged_commits))} cannot be read whole: some of their"
        " publications may lead to no run. Materialize the assets that depend on them."
        if damaged_commits
        else ""
    )


# -- reports in the event log --------------------------------------------------------------------------

REREAD_EVENT_IDS = 1_000
"""The number of event ids that are read again.

It is larger than the number of events that Dagster stores while one slow insert is under way.
"""

_PAGE = 1_000

PublicationKey = tuple[str, str | None]
"""(`branch@commit`, partition). Repeated reports of one publication have the same key."""


@dataclass(frozen=True)
class PublicationReport:
    """One observation in Dagster's event log that reports a publication of an asset or partition.

    `storage_id` is the id of the event, `branch` the published branch, and `commit` its commit on `main`. For
    the undo of a publication, `branch` is empty and `commit` is the commit of the undo.
    """

    storage_id: int
    branch: str
    commit: str
    partition: str | None

    @property
    def key(self) -> PublicationKey:
        """The key of the reported publication and partition; repeated reports have the same key."""
        return f"{self.branch}@{self.commit}", self.partition


def iter_publication_reports(
    instance: DagsterInstance, key: AssetKey, *, after_id: int, last_id: int
) -> Iterator[PublicationReport]:
    """Yield the publications reported for `key` with `after_id` < storage id <= `last_id`, in that order.

    Undos of publications are included. Reports of blocked, refused and discarded runs do not have a
    publication and are left out, as are observations by other writers.
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
            undo = observation.metadata.get(EventMetadata.UNDONE_BY)
            commit, branch = (
                observation.metadata.get(EventMetadata.PUBLICATION),
                observation.metadata.get(EventMetadata.BRANCH),
            )
            if undo is not None:
                yield PublicationReport(record.storage_id, "", str(undo.value), observation.partition)
            elif commit is not None and branch is not None:
                yield PublicationReport(
                    record.storage_id, str(branch.value), str(commit.value), observation.partition
                )
        if not page.has_more:
            return
        cursor = page.cursor


@dataclass(frozen=True)
class ReportCursor:
    """The position in an asset's reports.

    `last_id` is the id of the last event that was read. `delivered_keys` are the keys of the reports among
    the last `REREAD_EVENT_IDS` ids: these reports are read again, but not returned again.
    """

    last_id: int
    delivered_keys: frozenset[PublicationKey] = field(default_factory=frozenset)

    def to_json(self) -> str:
        """Return the cursor as text for Dagster to store."""
        partitions: dict[str, list[str | None]] = defaultdict(list)
        for publication, partition in sorted(self.delivered_keys, key=str):
            partitions[publication].append(partition)
        return json.dumps({"upto": self.last_id, "passed_on": partitions})

    @classmethod
    def from_json(cls, cursor: str) -> Self:
        """Parse a stored cursor, the result of `to_json`. Raises KeyError or ValueError for other text."""
        data = json.loads(cursor)
        names: Mapping[str, Sequence[str | None]] = data["passed_on"]
        return cls(data["upto"], frozenset((pub, part) for pub, parts in names.items() for part in parts))


@dataclass(frozen=True)
class ReportedPublication:
    """The partitions of one asset that the branch of a run brought to `main`.

    `branch` is empty for partitions that undos changed.
    """

    branch: str
    partitions: Set[str | None]


@dataclass(frozen=True)
class ReportReader:
    """Reads the publications that were reported for one asset in Dagster's event log, up to `last_id`.

    The cursor is the text of a `ReportCursor`. Without a cursor, reports up to the event `start_id` count as
    read, so history does not trigger requests.

    The publisher reports one observation per published partition. Reading "everything after the last event
    id" would be wrong for two reasons. A database may commit an event after another one with a higher id. And
    the same publication may be reported twice: by two publishers in a race, or because one died before it
    recorded that it had reported. So some earlier events are read again, and those that were delivered before
    are skipped.
    """

    instance: DagsterInstance
    key: AssetKey
    start_id: int
    last_id: int

    def read_since(self, cursor: str | None) -> NewPublications[ReportedPublication]:
        """Read the reports after `cursor`, up to `last_id`.

        The reported partitions of one branch are returned as one publication.
        """
        last_cursor = ReportCursor.from_json(cursor) if cursor else None
        since_id = last_cursor.last_id if last_cursor else self.start_id
        reports = list(
            iter_publication_reports(
                self.instance, self.key, after_id=since_id - REREAD_EVENT_IDS, last_id=self.last_id
            )
        )
        delivered_keys = (
            last_cursor.delivered_keys
            if last_cursor
            else {report.key for report in reports if report.storage_id <= since_id}
        )
        partitions: dict[str, set[str | None]] = defaultdict(set)
        for report in reports:
            if report.key not in delivered_keys:
                partitions[report.branch].add(report.partition)
        recent_keys = {
            report.key for report in reports if report.storage_id > self.last_id - REREAD_EVENT_IDS
        }
        return NewPublications(
            [ReportedPublication(*one) for one in partitions.items()],
            ReportCursor(self.last_id, frozenset(recent_keys)).to_json(),
            len(reports),
        )


# -- the sensor on main's log ----------------------------------------------------------------------------

_RequestBuilder = Callable[[PublishedAssets], Sequence[RunRequest] | str]
"""A function that returns the run requests for a publication, or a message that explains why it has none."""


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
        metadata=_watched_metadata(assets),
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
        reader: PublicationReader[PublishedAssets] = MainLogReader(
            lake.nessie,
            context.instance,
            {format_table_name(table_identifier(key, lake.settings.default_namespace)): key for key in keys},
        )
        new = reader.read_since(context.cursor)
        requests: list[RunRequest] = []
        messages = [new.note] if new.note else []
        for published in new.publications:
            result = build_requests(published)
            requests += [] if isinstance(result, str) else result
            messages += [result] if isinstance(result, str) else []
        for line in messages:
            context.log.info(line)
        commits = format_count(new.records_read, "commit")
        nothing_new = f"{commits} on main since the last tick, none of them for these assets."
        return SensorResult(
            run_requests=requests,
            cursor=new.cursor,
            skip_reason=None if requests else SkipReason(" ".join(messages) or nothing_new),
        )

    return follow


def _watched_metadata(
    assets: Sequence[CoercibleToAssetKey] | AssetSelection,
) -> dict[str, MetadataValue[Any]] | None:
    if isinstance(assets, AssetSelection):
        return None
    names = [AssetKey.from_coercible(asset).to_user_string() for asset in assets]
    return {AssetMetadata.WATCHED_ASSETS: MetadataValue.json(names)}


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
    """Return a function that builds the requests for `job`: one for each publication.

    A partitioned job gets one request for each published partition that still exists. Raises
    ConfigurationError if the job is partitioned and an asset of `keys` has other partitions.
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
