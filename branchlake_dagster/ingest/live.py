"""The live ingestion: batch after batch, each on its own branch, checked and published at once.

This module does not depend on Dagster. A batch may be interrupted at any point, by a signal or by the death
of its process. Then `main` is unchanged, and the next batch starts at the position of `main`. The reaper
recognizes the remaining branch by its name and removes it. Of two batches for the same offsets only one is
published, because both set the same table property.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyspark.sql import SparkSession

from branchlake_dagster.catalog.options import COMMIT_PROPERTY, NAMESPACE_CREATE
from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown, Transient
from branchlake_dagster.ingest.batch_context import BatchContext, plan_next_batch
from branchlake_dagster.ingest.batch_report import find_block_reason
from branchlake_dagster.ingest.declaration import Ingest
from branchlake_dagster.ingest.errors import Superseded, TooManyDeadLetters
from branchlake_dagster.ingest.ingest_batch import BatchResult, ingest_batch
from branchlake_dagster.ingest.kafka_topics import Topics
from branchlake_dagster.ingest.record_frames import Records
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieError, ReferenceNotFound
from branchlake_dagster.publication.ledger import Candidate, Published, Refused, load_write_set
from branchlake_dagster.publication.publisher import PublicationContended, build_publisher
from branchlake_dagster.publication.replay import IcebergTableFormat
from branchlake_dagster.runs.branch_owner import build_batch_branch_name
from branchlake_dagster.runs.discarding import end_judged_branch
from branchlake_dagster.runs.run_branch import ensure_main_has_commit
from branchlake_dagster.stored_names import LakeProperty

_ATTEMPTS = 5
"""Attempts to publish one batch while its outcome is unknown or other writers keep publishing."""
_log = logging.getLogger(__name__)


def can_continue_after(error: Exception) -> bool:
    """Return whether a live run continues after this error: it is transient, or its outcome is unknown.

    Then the branch of the batch is discarded, and `main` shows whether the batch was published.
    """
    commit_errors = (
        CommitFailedException | CommitStateUnknownException
    )  # PyIceberg raises these while it creates a table
    return isinstance(error, Transient | OutcomeUnknown | commit_errors)


@dataclass(frozen=True)
class LiveBatch:
    """A published batch. `publication` is the hash of its commit on `main`.

    `seconds` is the time from the start of its planning until its publication.
    """

    result: BatchResult
    publication: str
    seconds: float
    published_at: datetime


class LiveIngestion:
    """One ingestion in one process. `session_at` opens a Spark session at a Nessie reference.

    `properties` are added to each Nessie commit. `clock` counts seconds; `now` returns the time.
    """

    def __init__(
        self,
        ingest: Ingest,
        lake: Lakehouse,
        run_id: str,
        topics: Topics,
        records: Records,
        *,
        session_at: Callable[[str], SparkSession],
        tasks: int,
        properties: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._ingest = ingest
        self._lake = lake
        self._run_id = run_id
        self._topics = topics
        self._records = records
        self._session_at = session_at
        self._tasks = tasks
        self._properties = dict(properties)
        self._clock = clock
        self._sleep = sleep
        self._now = now
        self._number = 0
        self._keeps_snapshots = False
        self._shared_session: tuple[str | None, SparkSession] | None = None
        self._connect(lake.nessie)

    def publish_next_batch(self) -> LiveBatch | None:
        """Ingest one batch of the waiting records and publish it.

        Returns None, without a commit, if no record waits and no offset must be recorded.

        Raises TooManyDeadLetters; Superseded; PublicationContended; and the errors of `plan_next_batch`, of
        `ingest_batch` and of Nessie. After an OutcomeUnknown or an interruption the batch may be on `main`;
        after any other error it is not. The next batch starts at the offsets that `main` has then.
        """
        start_time, client = self._clock(), self._lake.nessie
        if client is not self._client:
            self._connect(client)  # a restarted embedded Nessie has another address
        base_hash = ensure_main_has_commit(client) if not self._number else client.reference(MAIN).hash
        self._number += 1
        planned_batch = plan_next_batch(
            self._ingest,
            client,
            self._lake.catalog(f"{MAIN}@{base_hash}"),
            self._topics,
            namespace=self._lake.settings.default_namespace,
            tables=self._tables,
        )
        if planned_batch.plan.is_empty:
            return None
        branch_name = self._branch_name()
        sessions: list[SparkSession] = []
        published = False
        # The run may be interrupted anywhere, even while the branch is created.
        try:
            branch = self._lake.nessie.create_branch(branch_name, from_ref=MAIN, from_hash=base_hash)
            batch_context = self._build_batch_context(branch.name, base_hash, sessions)
            result = ingest_batch(
                planned_batch,
                batch_context,
                self._records,
                tasks=self._tasks,
                clock=self._now,
                commit_id=str(uuid.uuid4()),
                tables=self._tables,
            )
            if reason := find_block_reason(result):
                raise TooManyDeadLetters(
                    f"Ingestion {self._ingest.name}: {reason}.",
                    branch=branch.name,
                    run_id=self._run_id,
                    hint="Nothing was published, and the next batch starts at the same offsets. Correct the"
                    " producer of the records, the tables or their contracts, or raise the tolerance.",
                )
            publication = self._publish(base_hash, result)
            published = True
        finally:
            self._clean_up(branch_name, sessions, published=published)
        return LiveBatch(result, publication, self._clock() - start_time, self._now())

    def _branch_name(self) -> str:
        """Return a name that shows the owner and age of the branch, as the process may die at any time."""
        instance, now = self._properties.get(LakeProperty.INSTANCE, ""), self._now()
        return build_batch_branch_name(self._run_id, instance, now=now, random_id=uuid.uuid4())

    def _connect(self, client: NessieClient) -> None:
        self._client = client
        self._publisher = build_publisher(self._lake)
        self._tables = IcebergTableFormat(self._lake.catalog(MAIN))

    def _build_batch_context(
        self, branch_name: str, base_hash: str, sessions: list[SparkSession]
    ) -> BatchContext:
        options = {NAMESPACE_CREATE: "true"} | {
            f"{COMMIT_PROPERTY}{name}": value for name, value in self._properties.items()
        }

        def open_session() -> SparkSession:
            if all(table.mode == "append" for table in self._ingest.tables):
                # Such a batch only reads topics and writes files, so the reference of the session does not
                # matter.
                server = self._lake.endpoints().spark_remote
                if self._shared_session is None or self._shared_session[0] != server:
                    self._shared_session = server, self._session_at(MAIN)
                return self._shared_session[1]
            if not sessions:
                sessions.append(self._session_at(branch_name))
            return sessions[0]

        snapshot_properties = {
            LakeProperty.RUN_ID: self._run_id,
            LakeProperty.ROOT_RUN_ID: self._run_id,
            LakeProperty.BASE_HASH: base_hash,
            LakeProperty.STEP: f"live-{self._number}",
            LakeProperty.ATTEMPT: "1",
        }
        catalog = self._lake.catalog(branch_name, properties=options)
        run_arguments = self._run_id, snapshot_properties, self._properties
        return BatchContext(
            self._lake,
            branch_name,
            catalog,
            open_session,
            *run_arguments,
            expires_snapshots=not self._keeps_snapshots,
        )

    def _publish(self, base_hash: str, result: BatchResult) -> str:
        client, branch = self._lake.nessie, result.head
        self._require_branch(branch.name)
        candidate = Candidate(
            branch=branch.name,
            head_hash=branch.hash,
            base_hash=base_hash,
            run_id=self._run_id,
            root_run_id=self._run_id,
            verdict="passed_with_warnings" if result.dead_letter_count else "passed",
            changes=load_write_set(client, base_hash, branch),
        )
        wait = 0.2
        unknown_outcome: Exception | None = None
        for attempt in range(1, _ATTEMPTS + 1):
            outcome = self._publisher.publish([candidate], alive=lambda: self._require_branch(branch.name))[
                branch.name
            ]
            if isinstance(outcome, Published):
                return outcome.hash
            if isinstance(outcome, Refused):
                raise self._refusal_error(outcome, branch.name)
            if not isinstance(outcome, Exception):
                raise Superseded(
                    "The publication needs checks, but a live batch has none.",
                    branch=branch.name,
                    reason="checks_needed",
                )
            if isinstance(outcome, OutcomeUnknown):
                unknown_outcome = unknown_outcome or outcome
            if attempt == _ATTEMPTS or not isinstance(outcome, Transient | OutcomeUnknown):
                if unknown_outcome is None or unknown_outcome is outcome:
                    raise outcome
                # A later failure does not show whether the earlier attempt has arrived.
                raise unknown_outcome from outcome
            self._sleep(wait)
            wait *= 2
        raise AssertionError("unreachable")

    def _refusal_error(self, refusal: Refused, branch_name: str) -> BranchlakeError:
        if not self._keeps_snapshots and refusal.only_expired:
            # Another writer changes these tables. A batch that is replayed onto its snapshots must not expire
            # any.
            self._keeps_snapshots = True
            return PublicationContended(
                f"Ingestion {self._ingest.name} conflicts with another writer: {refusal.format_reason()}",
                branch=branch_name,
                run_id=self._run_id,
                hint="The ingestion continues, but no longer expires old snapshots of its tables.",
                reason="expired_snapshots",
            )
        return Superseded(
            f"Ingestion {self._ingest.name}: {refusal.format_reason()}",
            branch=branch_name,
            run_id=self._run_id,
            hint="Nothing of this batch was published. The next batch starts from the present main.",
            reason=refusal.codes[0] if len(refusal.codes) == 1 else "refused",
        )

    def _require_branch(self, branch_name: str) -> None:
        """Raise Superseded if the branch is gone: then another process has fenced this run."""
        try:
            self._lake.nessie.reference(branch_name)
        except ReferenceNotFound as gone:
            raise Superseded(
                f"Ingestion {self._ingest.name} is fenced: the branch of this batch no longer exists.",
                branch=branch_name,
                run_id=self._run_id,
                hint="The branch was deleted, or reaped while this run was suspended. A new run continues on"
                " main.",
                reason="fenced",
            ) from gone

    def _clean_up(self, branch_name: str, sessions: list[SparkSession], *, published: bool) -> None:
        try:
            for session in sessions:
                session.stop()
            self._drop_branch(branch_name, published=published)
        except BaseException:
            # An interruption comes once, so repeat the cleanup that it may have interrupted.
            self._drop_branch(branch_name, published=published)
            raise

    def _drop_branch(self, branch_name: str, *, published: bool) -> None:
        try:
            end_judged_branch(
                self._lake.nessie, self._lake.nessie.reference(branch_name), keep_data=published
            )
        except ReferenceNotFound:
            pass  # the branch was never created, or another process has fenced this run
        except NessieError as error:
            _log.warning("Branch %s was not deleted, so the reaper will delete it: %s", branch_name, error)

    def close(self) -> None:
        """Stop the session that all batches have shared."""
        if self._shared_session is not None:
            self._shared_session[1].stop()
            self._shared_session = None
