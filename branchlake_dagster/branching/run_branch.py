"""The Nessie branch of one Dagster run: made at its first touch of the lake, pinned to a base hash."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from branchlake_dagster.branching.errors import RunBranchGone
from branchlake_dagster.branching.run_tags import base_hash_of, opened
from branchlake_dagster.lakehouse.errors import NessieAlreadyExists, NessieConflict, ReferenceNotFound
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.lakehouse.nessie.client import NessieClient
from branchlake_dagster.lakehouse.nessie.model import ContentKey, Namespace, Put, Reference
from branchlake_dagster.settings import RUN_BRANCH_PREFIX


def branch_name(run_id: str) -> str:
    """The branch of a run (seed 000: `run-{run_id}`)."""
    return f"{RUN_BRANCH_PREFIX}{run_id}"


def run_id_of(branch: str) -> str:
    """The run a run branch belongs to."""
    return branch.removeprefix(RUN_BRANCH_PREFIX)


def main_with_history(client: NessieClient) -> str:
    """The head of `main`, after giving an empty `main` its first commit.

    A branch made from an empty `main` can never be merged: Nessie finds no common ancestor.
    """
    head = client.reference(MAIN).hash
    if head != client.config().no_ancestor_hash:
        return head
    key = ContentKey(["branchlake"])
    try:
        return client.commit(
            MAIN,
            expected_hash=head,
            operations=[
                Put(
                    key,
                    Namespace(
                        None, key.elements, {"comment": "made so that branches have a common ancestor"}
                    ),
                )
            ],
            message="First commit: branches need a common ancestor",
        ).hash
    except NessieConflict:  # another run was first
        return client.reference(MAIN).hash


class RunBranch:
    """The branch of run `run_id`, created lazily and once, by whichever step touches the lake first.

    `tags` are the run's tags as Dagster knows them now, `remember` writes new ones. They tell a branch
    that was never made from one that was deleted: making the latter again would publish the rest of the
    run as though it were all of it.
    """

    def __init__(
        self,
        client: Callable[[], NessieClient],
        run_id: str,
        *,
        tags: Callable[[], Mapping[str, str]],
        remember: Callable[[Mapping[str, str]], None],
    ) -> None:
        self._client = client
        self._tags = tags
        self._remember = remember
        self._lock = threading.Lock()
        self._base_hash: str | None = None
        self.run_id = run_id
        self.name = branch_name(run_id)

    def open(self) -> str:
        """Make sure that the branch exists; its name. Raises RunBranchGone when it was deleted meanwhile."""
        with self._lock:
            if self._base_hash is None:
                tags = self._tags()
                self._base_hash = base_hash_of(tags, self.name)
                if self._base_hash is None:
                    self._base_hash = self._create()
                    self._remember(opened(self.run_id, self.name, self._base_hash, tags))
                else:
                    self._must_exist()
        return self.name

    @property
    def base_hash(self) -> str:
        """The hash of `main` the branch started from: the run's snapshot of the world."""
        self.open()
        assert self._base_hash is not None  # noqa: S101 - open() has set it
        return self._base_hash

    def head(self) -> Reference:
        """The branch as it is now. Raises RunBranchGone."""
        return self._must_exist()

    def _create(self) -> str:
        client = self._client()
        base = main_with_history(client)
        try:
            client.create_branch(self.name, from_ref=MAIN, from_hash=base)
        except NessieAlreadyExists:
            # Another step of this run was first, or died before it could write the tag.
            found = client.reference(self.name, fetch_metadata=True)
            return (found.metadata and found.metadata.common_ancestor_hash) or base
        return base

    def _must_exist(self) -> Reference:
        try:
            return self._client().reference(self.name)
        except ReferenceNotFound as error:
            raise RunBranchGone(
                "The run's branch was deleted under it; nothing of the run can be published.",
                branch=self.name,
                run_id=self.run_id,
                hint="Launch the run again; it will start from today's main.",
            ) from error
