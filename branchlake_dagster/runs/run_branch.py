"""Manage the Nessie branch of one Dagster run, which is created at the run's first access to the lake."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from branchlake_dagster.errors import OutcomeUnknown, Transient
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import (
    NessieAlreadyExists,
    NessieConflict,
    NessieError,
    ReferenceNotFound,
)
from branchlake_dagster.nessie.model import ContentKey, Namespace, Put, Reference
from branchlake_dagster.runs.run_tags import (
    RunLocation,
    build_opening_tags,
    find_recorded_base,
    find_run_location,
)
from branchlake_dagster.stored_names import ReferencePrefix
from branchlake_dagster.tables.errors import RunBranchGone

FALLBACK_WARNING = "Nessie unavailable, falling back to direct main writes"
"""The warning of an unbranched run."""

_MAX_ATTEMPTS = 4
_log = logging.getLogger(__name__)


def run_branch_name(run_id: str) -> str:
    """Return the name of a run's branch: `run-{run_id}`."""
    return f"{ReferencePrefix.RUN}{run_id}"


def run_id_of_branch(branch: str) -> str:
    """Return the id after the prefix `run-`: the id of a run, or the three ids of a batch."""
    return branch.removeprefix(ReferencePrefix.RUN)


def ensure_main_has_commit(client: NessieClient) -> str:
    """Make a first commit if `main` is empty. Return the hash of the head of `main`.

    A branch of an empty `main` could never be merged, because Nessie finds no common ancestor. Raises
    NessieConflict if four attempts to commit conflict.
    """
    key = ContentKey(["branchlake"])
    namespace = Namespace(None, key.elements, {"comment": "made so that branches have a common ancestor"})
    for _ in range(_MAX_ATTEMPTS):
        # The metadata shows whether a first commit exists.
        head = client.reference(MAIN, fetch_metadata=True)
        if head.metadata is not None and head.metadata.head_commit is not None:
            return head.hash
        try:
            return client.commit(
                MAIN,
                expected_hash=head.hash,
                operations=[Put(key, namespace)],
                message="First commit: branches need a common ancestor",
            ).hash
        except NessieConflict as conflict:  # another run was first, or Nessie had an internal conflict
            last_conflict = conflict
    raise last_conflict


class RunBranch:
    """The branch of run `run_id`, which is opened once, when a step first uses the lake.

    Args:
        client: Returns the Nessie client.
        run_id: The run.
        load_tags: Loads the run's present tags from Dagster. They distinguish a branch that was never created
            from a deleted one. A deleted branch must not be created again: the publication would miss the
            work before the deletion.
        add_tags: Adds tags to the run.
        inherit_location: Takes over the work of the run that this one retries; None if there is no such work.
        direct_main: Whether to use `main` if the branch cannot be created, with a warning.
        warn: Logs that warning.
        hold_leases: Ensures the run's leases, before the branch is created and at each access.
        report_head: Stores a hash of the branch in the run's log; see `record_head`.
        report_application: Stores the id of a Spark application in the run's log; see `record_application`.
    """

    def __init__(
        self,
        client: Callable[[], NessieClient],
        run_id: str,
        *,
        load_tags: Callable[[], Mapping[str, str]],
        add_tags: Callable[[Mapping[str, str]], None],
        inherit_location: Callable[[], RunLocation | None] = lambda: None,
        direct_main: bool = False,
        warn: Callable[[str], None] = _log.warning,
        hold_leases: Callable[[RunLocation | None], None] = lambda _: None,
        report_head: Callable[[str, str], None] = lambda *_: None,
        report_application: Callable[[str, str, str | None], None] = lambda *_: None,
    ) -> None:
        self._hold_leases = hold_leases
        self._report_head = report_head
        self._report_application = report_application
        self._recorded_applications: set[tuple[str, str | None, int]] = set()
        self._used_by_spark = False
        self._recorded_heads: set[str] = set()
        self._used_since_record = False
        self._used_by_code = False
        self._accesses: set[tuple[str, int]] = set()
        # Reentrant: a finalizer that runs while this thread holds a lock may end a resource.
        self._access_lock = threading.RLock()
        self._lock = threading.RLock()
        self._client = client
        self._load_tags = load_tags
        self._add_tags = add_tags
        self._inherit_location = inherit_location
        self._direct_main = direct_main
        self._warn = warn
        self._location: RunLocation | None = None
        self.run_id = run_id

    def open(self) -> RunLocation:
        """Open the run's branch, which is created if needed. Return the branch and its base hash.

        If Nessie is not available and `direct_main` is set, the run is unbranched: its branch is `main`, with
        an empty base hash if Nessie did not answer. Raises RunBranchGone if the branch was deleted, and the
        errors of `hold_leases` and `inherit_location`.
        """
        with self._lock:
            if self._location is None:
                self._location = self._resolve_location(self._create_branch)
            assert self._location is not None  # noqa: S101 - it was created at the latest
            self._hold_leases(self._location)
            self._used_since_record = True
            return self._location

    def take_over(self) -> bool:
        """Continue the work of the run that this one retries, if there is such work.

        Returns whether the run has a branch now. Unlike `open`, this does not create an empty branch.
        """
        with self._lock:
            if self._location is None:
                self._location = self._resolve_location(lambda: None)
            return self._location is not None

    def load_head(self) -> Reference:
        """Load the present head of the branch, which is created if needed.

        Raises RunBranchGone if the branch was deleted.
        """
        return self._require_branch(self.open().branch)

    def run_at_first_access(self, step: str, attempt: int, action: Callable[[], None]) -> None:
        """Call `action` once in this process for this attempt of a step.

        If it raises, the next access repeats it.
        """
        with self._access_lock:
            if (step, attempt) not in self._accesses:
                action()
                self._accesses.add((step, attempt))

    def note_use_by_code(self) -> None:
        """Note that a step's code got a catalog or session, with which it can write to the branch unnoticed.

        The next call of `record_head` then asks Nessie for the head.
        """
        self._used_by_code = True

    def record_application(self, application: str, step: str | None, attempt: int) -> None:
        """Record that the code of a step uses a session of a Spark application, once for each attempt.

        Called before the code gets the session. Spark's deletes of whole files name no run, but an
        application. The publisher accepts them from recorded applications, and a repeated step finds by these
        records which deletes are its own. Costs one event in the run's log.
        """
        location, use = self.open(), (application, step, attempt)
        if location.unbranched:
            return
        self._used_by_spark = True
        with self._access_lock:
            if use not in self._recorded_applications:
                self._report_application(location.branch, application, step)
                self._recorded_applications.add(use)

    def record_head(self) -> None:
        """Record the branch's hash as one that this run wrote, unless it is recorded already.

        After a use by Spark, it is recorded again: that shows which deletes the step can have made.

        Called when a step ends and when the process releases its resources. The publisher refuses a
        branch whose head no run recorded.

        Cost: one request to Nessie, or none if the branch was not used since its head was recorded. Nessie's
        errors are logged and not raised: the steps are done, and a later call tries again.
        """
        with self._lock:
            location, is_used = self._location, self._used_since_record or self._used_by_code
            if location is None or location.unbranched or not is_used:
                return
            # Reset before the request, so that a use during the request is recorded by the next call.
            self._used_since_record = self._used_by_code = False
            is_used_by_spark, self._used_by_spark = self._used_by_spark, False
        try:
            head = self._client().reference(location.branch).hash
            is_recorded = head == location.base_hash or head in self._recorded_heads
            if is_used_by_spark or not is_recorded:
                self._report_head(location.branch, head)
                self._recorded_heads.add(head)
        except ReferenceNotFound:
            return  # the run was fenced, or published already
        except NessieError as error:
            self._used_since_record, self._used_by_spark = True, is_used_by_spark
            _log.warning("The head of branch %s could not be recorded: %s", location.branch, error)
        except BaseException:
            self._used_since_record, self._used_by_spark = True, is_used_by_spark
            raise

    def note_recorded_head(self, hash_: str) -> None:
        """Note that a materialization of this process records `hash_`, the present head of the branch.

        The next call of `record_head` then needs no request, unless the step's own code has used the branch.
        """
        self._recorded_heads.add(hash_)
        self._used_since_record = False

    def _resolve_location(self, create_location: Callable[[], RunLocation | None]) -> RunLocation | None:
        tags = self._load_tags()
        recorded_location = self._parse_location(tags)
        if recorded_location is None:
            location = self._inherit_location() or create_location()
            if location is None:
                return None
            tags = self._load_tags()
            recorded_location = self._parse_location(tags)  # another process of this run may have been faster
            if recorded_location is None:
                self._add_tags(build_opening_tags(self.run_id, location, tags))
                return location
        self._require_branch(recorded_location.branch)
        return recorded_location

    def _parse_location(self, tags: Mapping[str, str]) -> RunLocation | None:
        own_branch = run_branch_name(self.run_id)
        base_hash = find_recorded_base(tags, own_branch)
        return find_run_location(tags, self.run_id) or (
            RunLocation(own_branch, base_hash) if base_hash else None
        )

    def _create_branch(self) -> RunLocation:
        self._hold_leases(None)  # first, so that the base includes what the previous holder published
        client = self._client()
        own_branch = run_branch_name(self.run_id)
        base_hash = ""
        try:
            base_hash = ensure_main_has_commit(client)
            client.create_branch(own_branch, from_ref=MAIN, from_hash=base_hash)
        except NessieAlreadyExists:
            # Another step of this run created the branch, or died before it could add the tags.
            existing = client.reference(own_branch, fetch_metadata=True)
            return RunLocation(
                own_branch, (existing.metadata and existing.metadata.common_ancestor_hash) or base_hash
            )
        except NessieError as error:
            # A refusal means that Nessie is available, so it must not bypass the gate. Otherwise an expired
            # certificate would let every run write to main.
            if not self._direct_main or not isinstance(error, Transient | OutcomeUnknown):
                raise
            self._warn(FALLBACK_WARNING)
            _log.warning("Branch %s could not be created: %s", own_branch, error)
            return RunLocation(MAIN, base_hash, unbranched=True)
        return RunLocation(own_branch, base_hash)

    def _require_branch(self, name: str) -> Reference:
        try:
            return self._client().reference(name)
        except ReferenceNotFound as error:
            raise RunBranchGone(
                "The run was fenced: its branch was deleted during the run. Nothing of the run can be"
                " published.",
                branch=name,
                run_id=self.run_id,
                hint="Retry from failure to continue its work, or launch a new run, which starts from today's"
                " main.",
            ) from error
