"""The Nessie branch of one Dagster run: made at its first touch of the lake, pinned to a base hash."""

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
from branchlake_dagster.runs.run_tags import Place, base_hash_of, opened, place_of
from branchlake_dagster.stored_names import ReferencePrefix
from branchlake_dagster.tables.errors import RunBranchGone

FALLING_BACK = "Nessie unavailable, falling back to direct main writes"
"""The warning of an unbranched run."""

_ATTEMPTS = 4
_log = logging.getLogger(__name__)


def branch_name(run_id: str) -> str:
    """The branch of a run: `run-{run_id}`."""
    return f"{ReferencePrefix.RUN}{run_id}"


def run_id_of(branch: str) -> str:
    """The run a run branch belongs to."""
    return branch.removeprefix(ReferencePrefix.RUN)


def main_with_history(client: NessieClient) -> str:
    """The head of `main`, after giving an empty `main` its first commit.

    A branch made from an empty `main` can never be merged: Nessie finds no common ancestor.
    """
    key = ContentKey(["branchlake"])
    first = Namespace(None, key.elements, {"comment": "made so that branches have a common ancestor"})
    for _ in range(_ATTEMPTS):
        # Its metadata, for they tell of a first commit: an empty branch has none.
        head = client.reference(MAIN, fetch_metadata=True)
        if head.metadata is not None and head.metadata.head_commit is not None:
            return head.hash
        try:
            return client.commit(
                MAIN,
                expected_hash=head.hash,
                operations=[Put(key, first)],
                message="First commit: branches need a common ancestor",
            ).hash
        except NessieConflict as conflict:  # another run was first, or Nessie lost a race with itself
            last = conflict
    raise last


class RunBranch:
    """Where run `run_id` works: its branch, opened once, by whichever step touches the lake first.

    `tags` are the run's tags as Dagster knows them now, `remember` writes new ones. They tell a branch
    that was never made from one that was deleted: making the latter again would publish the rest of the
    run as though it were all of it. `inherit` takes over the work of a run that this one retries, and
    answers None when there is none. `direct_main`: stand on `main` when the branch cannot be made, and
    `warn` of it. `hold` makes sure of the run's leases, before the branch is made and at each access.
    `report_head` stores a hash of the branch with the run's evidence, see `record_head`.
    """

    def __init__(
        self,
        client: Callable[[], NessieClient],
        run_id: str,
        *,
        tags: Callable[[], Mapping[str, str]],
        remember: Callable[[Mapping[str, str]], None],
        inherit: Callable[[], Place | None] = lambda: None,
        direct_main: bool = False,
        warn: Callable[[str], None] = _log.warning,
        hold: Callable[[Place | None], None] = lambda _: None,
        report_head: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        self._hold = hold
        self._report_head = report_head
        self._recorded_heads: set[str] = set()
        self._used_since_record = False
        self._used_by_code = False
        self._accesses: set[tuple[str, int]] = set()
        self._access_lock = threading.Lock()
        self._client = client
        self._tags = tags
        self._remember = remember
        self._inherit = inherit
        self._direct_main = direct_main
        self._warn = warn
        self._lock = threading.Lock()
        self._place: Place | None = None
        self.run_id = run_id

    def open(self) -> Place:
        """The branch, made if needed, and where it started. Raises RunBranchGone when it was deleted.

        For an unbranched run that is `main`, with an empty base hash when Nessie could not tell it.
        """
        with self._lock:
            if self._place is None:
                self._place = self._settle(self._create)
            assert self._place is not None  # noqa: S101 - it was created at the latest
            self._hold(self._place)
            self._used_since_record = True
            return self._place

    def take_over(self) -> bool:
        """Continue the work of the run that this one retries now, if there is any; create nothing."""
        with self._lock:
            if self._place is None:
                self._place = self._settle(lambda: None)
            return self._place is not None

    def head(self) -> Reference:
        """The branch as it is now. Raises RunBranchGone."""
        return self._must_exist(self.open().branch)

    def at_first_access(self, step: str, attempt: int, action: Callable[[], None]) -> None:
        """Call `action` once in this process for this attempt of a step, and again only if it raised."""
        with self._access_lock:
            if (step, attempt) not in self._accesses:
                action()
                self._accesses.add((step, attempt))

    def note_use_by_code(self) -> None:
        """Note that a step's own code can write to the branch from now on, without another call here."""
        self._used_by_code = True

    def record_head(self) -> None:
        """Record the branch's hash as one that this run wrote, unless it is recorded already.

        Called when a step has succeeded and when the process gives up its resources. The publisher refuses a
        branch whose head no run recorded. Costs one request to Nessie, and none if nobody opened the branch
        since its head was recorded. An error is logged and not raised: the steps are done, and a later call
        tries again.
        """
        with self._lock:
            place, used = self._place, self._used_since_record or self._used_by_code
            if place is None or place.unbranched or not used:
                return
            # Before the request: a use while it is on its way has to be recorded by the next call.
            self._used_since_record = self._used_by_code = False
        try:
            head = self._client().reference(place.branch).hash
            if head != place.base_hash and head not in self._recorded_heads:
                self._report_head(place.branch, head)
                self._recorded_heads.add(head)
        except ReferenceNotFound:
            return  # the run was fenced, or published already
        except NessieError as error:
            self._used_since_record = True
            _log.warning("The head of branch %s could not be recorded: %s", place.branch, error)
        except BaseException:
            self._used_since_record = True
            raise

    def head_recorded(self, hash_: str) -> None:
        """Note that a materialization of this process carries the branch's present hash."""
        self._recorded_heads.add(hash_)
        self._used_since_record = False

    def _settle(self, otherwise: Callable[[], Place | None]) -> Place | None:
        tags = self._tags()
        known = self._remembered(tags)
        if known is None:
            place = self._inherit() or otherwise()
            if place is None:
                return None
            tags = self._tags()
            known = self._remembered(tags)  # another process of this run was faster; follow it
            if known is None:
                self._remember(opened(self.run_id, place, tags))
                return place
        self._must_exist(known.branch)
        return known

    def _remembered(self, tags: Mapping[str, str]) -> Place | None:
        own = branch_name(self.run_id)
        base = base_hash_of(tags, own)
        return place_of(tags, self.run_id) or (Place(own, base) if base else None)

    def _create(self) -> Place:
        self._hold(None)  # first: what the holder before has published is then in the base
        client = self._client()
        own = branch_name(self.run_id)
        base = ""
        try:
            base = main_with_history(client)
            client.create_branch(own, from_ref=MAIN, from_hash=base)
        except NessieAlreadyExists:
            # Another step of this run was first, or died before it could write the tag.
            found = client.reference(own, fetch_metadata=True)
            return Place(own, (found.metadata and found.metadata.common_ancestor_hash) or base)
        except NessieError as error:
            # A Nessie that refuses is available, and what it refuses must not go around the gate: with
            # an expired certificate every run would write to main.
            if not self._direct_main or not isinstance(error, Transient | OutcomeUnknown):
                raise
            self._warn(FALLING_BACK)
            _log.warning("Branch %s could not be made: %s", own, error)
            return Place(MAIN, base, unbranched=True)
        return Place(own, base)

    def _must_exist(self, name: str) -> Reference:
        try:
            return self._client().reference(name)
        except ReferenceNotFound as error:
            raise RunBranchGone(
                "The run was fenced: its branch was deleted under it; nothing of the run can be published.",
                branch=name,
                run_id=self.run_id,
                hint="A retry from failure continues where it stopped; a new run starts from today's main.",
            ) from error
