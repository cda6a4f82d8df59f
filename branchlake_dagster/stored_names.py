"""The names of tags, metadata, properties, references and record headers that branchlake stores.

These names are in users' lakes, event logs and code, so they never change. Names without a version exist
since version 0.1.0. A test compares the names in the code with those in a stored lake
(`branchlake_dagster_tests.baseline`). The columns of dead letters and of change tables are defined where the
tables are (`ingest/batch_tables.py`, `history/rows.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

_HIDDEN = ".dagster/branchlake_"
"""Dagster's run list hides tags with its own prefix. It allows one slash in a tag's name."""


class RunTag:
    """Tags of Dagster runs and backfills."""

    STATUS = "branchlake"
    """The run's `RunState` in one word. The run list shows this tag."""

    BRANCH = f"{_HIDDEN}branch"
    BASE_HASH = f"{_HIDDEN}base_hash"
    """The hash of `main` from which the run's branch was created."""
    OPENED_BY = f"{_HIDDEN}opened_by"
    """The id of the run that wrote these tags. If it is another run's id, the tags were inherited."""
    LAKE = f"{_HIDDEN}lake"
    """`Settings.lake_id` of the run's lake. One code location may have several lakes."""
    CONTINUES = f"{_HIDDEN}continues"
    """The branch of the failed run whose work this retry took over."""
    RETENTION = f"{_HIDDEN}retention"
    """How long the branch and its discarded data are kept, as JSON: settings of the run's code location."""
    UNBRANCHED = f"{_HIDDEN}unbranched"
    """`true` if the run wrote to `main` directly because its branch could not be created."""
    WORKER = f"{_HIDDEN}worker"
    """The run's worker process, as JSON."""

    VERDICT = f"{_HIDDEN}verdict"
    PUBLICATION = f"{_HIDDEN}publication"
    """The hash of the commit on `main` that published the run."""
    REASON = f"{_HIDDEN}reason"
    FAILED_BY = f"{_HIDDEN}failed_by"
    """`publisher` if the run's steps succeeded and the publisher marked the run as failed."""
    REPORTED = f"{_HIDDEN}reported"
    """The number of published partitions that were reported to their assets, while others are not yet."""
    ATTEMPTS = f"{_HIDDEN}attempts"
    """How often the publisher has tried to judge or publish the run."""
    NEXT_ATTEMPT = f"{_HIDDEN}next_attempt"
    """When the publisher tries again: an ISO time, or `set aside` while the run is parked."""
    ALERT_PREFIX = f"{_HIDDEN}alert_"
    """A prefix; a sensor's name follows. The value is `{run_id} sent`, or the number of failed attempts."""

    CHECK_REF = f"{_HIDDEN}check_ref"
    """On a run that repeats checks for the publisher: the branch that it reads."""
    CHECK_HASH = f"{_HIDDEN}check_hash"
    """On a run that repeats checks: the hash of that branch at which the checks read."""
    CHECKS_FOR = f"{_HIDDEN}checks_for"
    """On a run that repeats checks: the runs whose publication waits for it, separated by commas."""

    APPROVAL = "branchlake/approval"
    """`required` or `given`: the run's result is consumed only after a user has approved it."""
    FOLLOWS = "branchlake/follows"
    """The ids of the backfills whose results this run was computed from, separated by commas."""
    HELD_UNTIL_APPROVED = f"{_HIDDEN}held_until_approved"
    """`true` on a run that a sensor launched while none of its inputs waited for approval."""
    BACKFILL = "branchlake/backfill"
    """On the runs of a backfill's first stage, and on relaunched runs: the reason of the backfill."""
    BACKFILL_BASE = "branchlake/backfill_base"
    """On a backfill and its runs: the commit of `main` with which its stages are compared."""
    RETRY_OF = "branchlake/retry_of"
    """On runs that launch partitions of a backfill again: the id of the backfill."""

    REBUILD = "branchlake/rebuild"
    """`true` makes a consumer ignore its recorded positions and compute all rows again."""
    RETRY = "branchlake/retry"
    """On a run that a sensor launched again: the number of the retry, from 1."""
    AFTER_PUBLICATION = "branchlake/after_publication"
    """On a requested run: the commit on `main` that it follows."""
    AFTER_RUN = "branchlake/after_run"
    """On a requested run: the published run that it follows."""
    INGESTION = "branchlake/ingestion"
    """On each run of an ingestion: the ingestion's name. Concurrency limits can select it."""
    REPROCESS = "branchlake/reprocess"
    """On a run that reprocesses dead letters instead of reading topics: their selection, as text."""
    REPROCESS_RAW = "branchlake/reprocess_raw"
    """On a run that decodes kept records again instead of reading topics: the interval of their receipt."""


class AssetMetadata:
    """Metadata of asset, check and sensor definitions."""

    WRITE_MODE = "branchlake/write_mode"
    KEYS = "branchlake/keys"
    WHEN_MATCHED = "branchlake/when_matched"
    LAYOUT = "branchlake/layout"
    PROPERTIES = "branchlake/properties"
    COLUMNS = "branchlake/columns"
    ISOLATION = "branchlake/isolation"
    EXCLUSIVE = "branchlake/exclusive"
    REQUIRE_CHECKS = "branchlake/require_checks"
    PREVIEW_ROWS = "branchlake/preview_rows"
    CONSUMES = "branchlake/consumes"
    LIVE_INGESTION = "branchlake/live_ingestion"
    """The name of the live ingestion that may fill the asset's table."""
    CHECK_SCOPE = "branchlake/scope"
    """On a check. `rows`: it reads only the run's partitions, so publications of other runs do not change its
    verdict. `table`: it reads all rows of the table, so it is repeated after a rebase."""
    LAUNCH_POLICY = "branchlake/launch_policy"
    """On a sensor: its `LaunchPolicy`, for pages that explain why no run was launched."""
    WATCHED_ASSETS = "branchlake/watched_assets"
    """On a `published_sensor`: the keys of its assets, if it was given keys. Since 0.2.0."""


class EventMetadata:
    """Metadata of materializations, observations, check evaluations and engine events."""

    TABLE = "branchlake/table"
    REF = "branchlake/ref"
    BRANCH = "branchlake/branch"
    BASE_HASH = "branchlake/base_hash"
    BRANCH_HEAD = "branchlake/branch_head"
    """The hash of the run's branch after a write: on materializations, and on engine events."""
    SPARK_APPLICATION = "branchlake/spark_application"
    """On an engine event: the id of the Spark application whose session the code of the step uses. Since
    0.2.0."""
    SNAPSHOT_ID = "branchlake/snapshot_id"
    WRITE_MODE = "branchlake/write_mode"
    UPSERT_ENGINE = "branchlake/upsert_engine"
    """The engine that matched the rows of an upsert: `PyIceberg` or `Spark`."""
    UPSERT_BY_SPARK_BECAUSE = "branchlake/upsert_by_spark_because"
    """A value of `SparkReason`; absent if PyIceberg wrote the upsert."""
    UNBRANCHED = "branchlake/unbranched"
    PREVIEW = "branchlake/preview"
    """The first rows that the run wrote."""
    ROWS_ON_BRANCH = "branchlake/rows_on_branch"
    """Rows of the whole table on the run's branch. The key is not `dagster/row_count`, which Dagster's pages
    show as the asset's row count: a blocked run once showed 3,750 rows while `main` had 2,000."""
    PARTITION_ROWS_ON_BRANCH = "branchlake/partition_rows_on_branch"
    READ_TABLES = "branchlake/read_tables"
    """On an engine event: dotted names of the tables that a step read, as a JSON list."""
    UNNAMED_READS = "branchlake/read_untold"
    """On an engine event: descriptions of reads of a step whose table is unknown, as a JSON list."""

    RUN = "branchlake/run"
    VERDICT = "branchlake/verdict"
    CHECKS = "branchlake/checks"
    REASONS = "branchlake/reasons"
    TABLES = "branchlake/tables"
    REBASED = "branchlake/rebased"
    PUBLICATION = "branchlake/publication"
    """The hash of the publication's commit on `main`. Automation follows observations that have this key."""
    UNDONE_BY = "branchlake/undone_by"
    """The hash of the commit on `main` that undid the publication. Since 0.2.0."""
    STALE_SINCE = "branchlake/stale_since"
    """The hash of a commit on `main` that undid rows from which the partition was computed. Since 0.2.0."""
    STALE_INPUTS = "branchlake/stale_inputs"
    """The tables with these rows, separated by commas. Since 0.2.0."""
    COMMIT_PAGE = "branchlake/commit"
    """The URL of the commit in Nessie's web page, if a browser can open that page."""
    ON_MAIN = "branchlake/on_main"
    """Whether `main` contains the rows that the run materialized.

    Only a partition's newest observation counts.
    """
    TABLE_ROWS = "dagster/row_count"
    """Rows of the whole table on `main`."""
    PARTITION_ROWS = "dagster/partition_row_count"
    """Rows of the partition on `main`."""
    FAILING_ROWS = "branchlake/failing_rows"
    """Rows that failed checks of the asset in this run, summed over its checks."""
    FAILING_PARTITIONS = "branchlake/failing_partitions"
    """On a check that read several partitions: the partitions that have failing rows."""
    PROVED_BY = "branchlake/proved_by"
    """On a check: `metadata` if it read no row, `rows` if it read a few rows without Spark."""
    PROVED_BY_FILES = "branchlake/proved_by_files"
    PROVED_BY_ROWS = "branchlake/proved_by_rows"
    PUBLISHER_S = "branchlake/publisher_s"
    """Seconds from reading the run's branch to its publication."""
    PUBLICATION_DELAY_S = "branchlake/publication_delay_s"
    """Seconds from the materialization to its publication."""

    CONSUMED = "branchlake/consumed"
    CONSUMED_COMMITS = "branchlake/consumed_commits"
    CONSUMED_FILES = "branchlake/consumed_files"
    CONSUMED_ROWS = "branchlake/consumed_rows"
    CHANGED_RANGE = "branchlake/changed_range"
    WAITS_FOR_PARTITION = "branchlake/waits_for_partition"
    UNCONSUMED = "branchlake/unconsumed"
    UNCONSUMED_ROWS = "branchlake/unconsumed_rows"
    UNCONSUMED_FILES = "branchlake/unconsumed_files"
    UNCONSUMED_AGE_S = "branchlake/unconsumed_age_s"
    UNCONSUMED_PARTITIONS = "branchlake/unconsumed_partitions"
    UNCONSUMED_PARTITION_COUNT = "branchlake/unconsumed_partition_count"
    VALID_THROUGH = "branchlake/valid_through"
    """The event time through which the table has all records."""
    WANTED_THROUGH = "branchlake/wanted_through"

    STATE = "branchlake/state"
    TOPICS = "branchlake/topics"
    TOPIC_ID = "branchlake/topic_id"
    PARTITIONS = "branchlake/partitions"
    OFFSETS = "branchlake/offsets"
    RECORDS = "branchlake/records"
    LAG = "branchlake/lag"
    BATCHES = "branchlake/batches"
    COMMIT_ID = "branchlake/commit_id"
    ROWS_OF_BATCH = "branchlake/rows_of_batch"
    DAYS = "branchlake/days"
    """On a batch: the number of its rows for each day of their event time."""
    DAY_ROWS_ADDED = "branchlake/day_rows_added"
    DAY_ROWS_REMOVED = "branchlake/day_rows_removed"
    """On a day of an ingested table: rows of the files that were added and removed since the last report."""
    ROWS_OUTSIDE_DAYS = "branchlake/rows_outside_days"
    """On the days of an ingested table: the number of published rows whose day is not a partition."""
    DEAD_LETTERS = "branchlake/dead_letters"
    EXPIRED_RECORDS = "branchlake/expired_records"
    """On the kept records of an ingestion: the records that the batch removed because of their age."""
    NOTES = "branchlake/notes"
    VISIBLE_AFTER_S = "branchlake/visible_after_s"
    VALID_THROUGH_AGE_S = "branchlake/valid_through_age_s"
    OLDEST_WAITING = "branchlake/oldest_waiting"
    OLDEST_WAITING_S = "branchlake/oldest_waiting_s"
    RECEIVED = "branchlake/received"
    RECEIVERS_SILENT = "branchlake/receivers_silent"
    RECEIVER_BUFFERED = "branchlake/receiver_buffered"
    RECEIVER_BUFFER_USED = "branchlake/receiver_buffer_used"
    HANDED_OVER = "branchlake/handed_over"
    DROPPED = "branchlake/dropped"
    DROPPED_PREFIX = "branchlake/dropped_"
    """A prefix; the reason for which receivers dropped records follows."""


class LakeProperty:
    """Properties of Nessie commits and Iceberg tables, and entries of Iceberg snapshot summaries."""

    PREFIX = "branchlake."

    PUBLICATION_ID = "branchlake.publication_id"
    """On a commit of `main`: the ids of the publications that it made, separated by commas."""
    BRANCH = "branchlake.branch"
    BASE_HASH = "branchlake.base_hash"
    VERDICT = "branchlake.verdict"
    TABLES = "branchlake.tables"
    REBASED = "branchlake.rebased"
    """On a commit that prepares a publication: the tables whose changes were replayed."""
    INSTANCE = "branchlake.instance"
    """On a commit or a snapshot: the Dagster instance of the run."""
    RUN_ID = "branchlake.run_id"
    ROOT_RUN_ID = "branchlake.root_run_id"

    ASSET = "branchlake.asset"
    PARTITION = "branchlake.partition"
    CODE_VERSION = "branchlake.code_version"
    WRITE_MODE = "branchlake.write_mode"
    KEYS = "branchlake.keys"
    REPLACED = "branchlake.replaced"
    """On a snapshot: the predicate whose rows it replaced, as JSON."""
    STEP = "branchlake.step"
    """On a snapshot of the IO manager: the step whose output it contains."""
    ATTEMPT = "branchlake.attempt"
    """On a snapshot: the attempt of the step, from 1."""
    CODE_OF_STEP = "branchlake.code_of_step"
    """On a commit or a snapshot: the step whose own code wrote it. The run's Spark session adds this property
    to all its snapshots; snapshots of the IO manager also have `branchlake.step`."""
    CODE_ATTEMPT = "branchlake.code_attempt"
    """On a snapshot of the run's Spark session: the attempt of the step in `branchlake.code_of_step`, from 1.
    Since 0.2.0."""
    UNBRANCHED = "branchlake.unbranched"
    """On a snapshot: `true` if its run wrote to `main` directly."""
    UNDOES = "branchlake.undoes"
    """On a snapshot that removes rows of the step's earlier attempts: the ids of their snapshots."""
    REPLAYED_FROM = "branchlake.replayed_from"
    """On a snapshot that a rebase wrote: the id of the replayed snapshot on the run's branch."""
    UNDONE_PUBLICATIONS = "branchlake.undone_publications"
    """On a commit of `main` and its snapshots: the ids of the publications that it undoes, separated by
    commas. Since 0.2.0."""
    UNDONE_RUNS = "branchlake.undone_runs"
    """On a commit that undoes publications: the ids of their runs. Since 0.2.0."""
    UNDONE_SNAPSHOTS = "branchlake.undone_snapshots"
    """On a snapshot of a commit that undoes publications: the snapshots that it reverses. Since 0.2.0."""
    UNDONE_SUPERSEDED_BY = "branchlake.undone_superseded_by"
    """On a commit that undoes publications: snapshots that had replaced rows of these before. Since 0.2.0."""
    EXPIRY_ID = "branchlake.expiry_id"
    """On a commit of `main` that expires snapshots or merges manifests: the id of the call. Since 0.2.0."""
    EXPIRED_SNAPSHOTS = "branchlake.expired_snapshots"
    """On the commit of an expiry: how many snapshots it removed. Since 0.2.0."""
    MAINTENANCE = "branchlake.maintenance"
    """On a commit of `main`, or a snapshot, that changes no row: a `MaintenanceKind`. Since 0.2.0."""
    REVERSED_SNAPSHOTS = "branchlake.reversed_snapshots"
    """On a snapshot of a run: the ids of compaction snapshots that precede it on `main`, newest first. It
    does not contain the files that these compactions wrote. Since 0.2.0."""
    WHEN_MATCHED = "branchlake.when_matched"
    """On a snapshot of an upsert: `keep` if rows with existing keys were left unchanged. Since 0.2.0."""
    JOURNAL_ID = "branchlake.journal_id"
    """On the tables of the garbage collection's journal: the id of the journal. Since 0.2.0."""
    CHANGE_OF = "branchlake.change_of"
    """On a change table's snapshot: the table whose files it refers to."""

    CONSUMED = "branchlake.consumed"
    """On a consumer's table: the positions of its inputs, as JSON."""
    CONSUMED_PREFIX = "branchlake.consumed."
    """A prefix; a partition key follows. On a consumer's table: the positions of that partition, as JSON."""
    OFFSETS_PREFIX = "branchlake.offsets."
    """A prefix; an ingestion's name follows.

    On its tables: the offsets before which they have all records.
    """
    REPROCESSED_PREFIX = "branchlake.reprocessed."
    """A prefix; an ingestion's name follows. On a table: the runs that reprocessed its dead letters. On a
    snapshot: the offsets before which the table had all records at that time."""
    KEPT_SINCE_PREFIX = "branchlake.kept_since."
    """A prefix; an ingestion's name follows. On the table of its kept records: the first day that is kept."""
    TABLES_PREFIX = "branchlake.tables."
    """A prefix; an ingestion's name follows.

    On its dead-letter table: the tables that its records have named.
    """
    COMMIT_ID = "branchlake.commit_id"
    VALID_THROUGH_MS = "branchlake.valid_through_ms"

    LEASE = "branchlake.lease"
    HOLDER = "branchlake.holder"
    FENCING_TOKEN = "branchlake.fencing_token"  # noqa: S105 - the name of a property


class ReferencePrefix:
    """Prefixes of Nessie references. A UUID follows; other references are never touched."""

    RUN = "run-"
    """The branch of a run, or of a live ingestion's batch."""
    PUBLICATION = "publish-"
    """A branch on which the publisher prepares publications that had to be rebased."""
    DISCARDED = "discarded-"
    """A tag that keeps the head of a discarded branch until its data may be deleted."""
    SWEEPING = "sweeping-"
    """A tag that reserves discarded data for the sweeper that deletes it."""
    CLAIM = "judged-"
    """A tag by which one publisher claims the judgment of a run."""
    UNDROP = "undrop-"
    """A tag that keeps the files of a dropped table while the table is restored. The time at which the tag
    ends and a UUID follow. Since 0.2.0."""
    READING = "reading-"
    """A tag that keeps a state readable for a reader. The time at which the tag ends and a UUID follow.
    Since 0.2.0."""
    COMPACTION = "compact-"
    """A branch on which a compaction rewrites files. Its UUID has version 1, so it contains the time at which
    the branch was created. Since 0.2.0."""


class MaintenanceKind:
    """Values of `LakeProperty.MAINTENANCE`."""

    COMPACTION = "compaction"
    COMPACTION_REVERSED = "compaction_reversed"
    """On a snapshot: a rebase restored files that a compaction had rewritten."""


JOURNAL_BRANCH = "branchlake-maintenance"
"""The branch with the journal of the garbage collection. It shares no commit with `main`. Since 0.2.0."""


class LakeFolder:
    """Branchlake's own folders in the warehouse."""

    HEARTBEATS = "_branchlake/heartbeats"
    PREFIXES = "_branchlake/prefixes"
    REPOSITORIES = "_branchlake/repositories"
    """The folder with a file for each Nessie repository that has tables in the warehouse. Since 0.2.0."""
    GARBAGE_COLLECTION = "_branchlake/garbage_collection"
    """The folder with the marker file of the garbage collection, which contains the journal's id.

    Since 0.2.0.
    """


class RecordHeader:
    """Kafka headers of records that receivers produce."""

    RECEIVER = "branchlake.receiver"
    PROTOCOL = "branchlake.protocol"
    RECEIVED_NS = "branchlake.received_ns"
    """The time at which the receiver got the record, in nanoseconds since 1970."""
    SOURCE = "branchlake.source"
    CURSOR = "branchlake.cursor"


CHANGE_TABLE_INFIX = "__change__"
"""The text between the names of the input and of the consumer in a change table's name."""
KEPT_RECORDS_SUFFIX = "_kept_records"
"""The suffix of the table that keeps an ingestion's records as they were received; its name comes first."""


@dataclass(frozen=True)
class ExclusiveProperty:
    """A table property whose value records from which input a run's rows were computed, such as offsets.

    If two runs set the property to different values, only one of them can be published. A run that sets the
    property cannot be replayed on a table that was rolled back or replaced, because the value would hide that
    the table lacks rows.

    Attributes:
        prefix: The beginning of the property's name.
        conflict_reason: The reason why the second of two runs is refused.
        conflict_code: The code of `conflict_reason`.
        rewind_reason: The reason why a run is refused if its table was rolled back or replaced.
        later_rows_prefix: The prefix of another exclusive property, or None. Both properties' names end with
            the same ingestion's name. A snapshot on `main` with the other property appends records that were
            received later. A run with this property never changes these records, so the two do not conflict.
        is_position: Whether the next run reads from the value. The undo of a publication may keep positions.
    """

    prefix: str
    conflict_reason: str
    conflict_code: str
    rewind_reason: str
    later_rows_prefix: str | None = None
    is_position: bool = True


_REWIND_REASON = (
    "it was rolled back or replaced, and the read positions that the run recorded would hide that"
)

EXCLUSIVE_PROPERTIES = (
    ExclusiveProperty(
        LakeProperty.CONSUMED,
        "another run of this consumer was published first: both have consumed the same change",
        "run_published_first",
        _REWIND_REASON,
    ),
    ExclusiveProperty(
        LakeProperty.OFFSETS_PREFIX,
        "another batch of this ingestion was published first: both have read the same offsets",
        "batch_published_first",
        _REWIND_REASON,
    ),
    ExclusiveProperty(
        LakeProperty.REPROCESSED_PREFIX,
        "another run of this ingestion has reprocessed dead letters meanwhile, possibly the same ones",
        "dead_letters_reprocessed",
        _REWIND_REASON,
        later_rows_prefix=LakeProperty.OFFSETS_PREFIX,
        is_position=False,
    ),
)
"""All exclusive properties. Every check of a publication uses this list."""


def find_exclusive_property(name: str) -> ExclusiveProperty | None:
    """Return the exclusive property whose prefix is the beginning of `name`; None without such a property."""
    return next((each for each in EXCLUSIVE_PROPERTIES if name.startswith(each.prefix)), None)
