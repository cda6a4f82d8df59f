"""One commit on `main` for several candidates: planned on its present hash, sent expecting that hash.

It is looked for in the ledger before it is planned again, at the very hash that the plan expects. Two
commits of one plan cannot both succeed, because each changes keys that the other expects unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from branchlake_dagster.lakehouse.errors import (
    BranchlakeError,
    NessieConflict,
    NessieOutcomeUnknown,
    Transient,
)
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.lakehouse.nessie.client import NessieClient
from branchlake_dagster.lakehouse.nessie.model import Content, ContentKey
from branchlake_dagster.publication.candidate import Candidate, NeedsChecks, Published, Refused, Result
from branchlake_dagster.publication.explain import explained
from branchlake_dagster.publication.ledger import message, properties, published
from branchlake_dagster.publication.rebase import Plan
from branchlake_dagster.publication.replay import Tables

_ATTEMPTS = 5


class TableFilesUnreadable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Metadata or manifests of a table could not be read or written; nothing was published."""


class PublicationContended(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Others kept publishing into the same tables; nothing was published, and the next tick tries again."""


class Committer:
    """Plans and sends commits; safe to be used by several publishers at once."""

    def __init__(self, client: NessieClient, tables: Tables) -> None:
        self._client = client
        self._tables = tables

    def publish(self, batch: Sequence[Candidate]) -> dict[str, Result | BranchlakeError]:
        """Plan and commit until `main` holds still in between."""
        reads = {one.branch: self._reads(one) for one in batch}
        keys = _involved(batch)
        for _ in range(_ATTEMPTS):
            seen = self._client.contents_at(MAIN, keys)
            results: dict[str, Result | BranchlakeError] = {**self._known(batch, at=seen.reference.hash)}
            plan = Plan(seen.reference.hash, seen.contents, self._tables)
            for candidate in batch:
                if candidate.branch not in results:
                    stopped = self._add(plan, candidate, reads[candidate.branch])
                    if stopped is not None:
                        results[candidate.branch] = stopped
            if not plan.accepted:
                return results
            hash_ = self.send(plan, MAIN)
            if hash_ is not None:
                done = {one.branch: Published(hash_, rebased=tables) for one, tables in plan.accepted.items()}
                return {**results, **done}
        raise PublicationContended(
            f"Main moved {_ATTEMPTS} times while the publication was planned.",
            table=", ".join(batch[0].tables),
            branch=batch[0].branch,
            run_id=batch[0].run_id,
            hint="Nothing is lost: the next tick of the publication sensor tries again.",
        )

    def _add(
        self, plan: Plan, candidate: Candidate, reads: Mapping[ContentKey, Content]
    ) -> Refused | NeedsChecks | BranchlakeError | None:
        """Add a candidate to a plan; why it is not in, else None."""
        try:
            with _files_of(candidate):
                stopped = plan.add(candidate, reads)
        except TableFilesUnreadable as error:
            return error
        if isinstance(stopped, Refused):
            return explained(self._client, candidate, stopped, at=plan.onto)
        return stopped

    def _known(self, batch: Iterable[Candidate], *, at: str) -> dict[str, Published]:
        """Those that the ledger has already. `at` is the hash that the plan will expect.

        Looking at exactly that hash closes the race: whatever is published after it changes keys of the
        plan, which is then refused and made again.
        """
        bases: dict[str, list[str]] = {}
        for one in batch:
            bases.setdefault(one.base_hash, []).append(one.branch)
        found: dict[str, Published] = {}
        for base, branches in bases.items():
            for branch, done in published(self._client, branches, at=f"{MAIN}@{at}", since=base).items():
                found[branch] = Published(done.hash, now=False)
        return found

    def _reads(self, candidate: Candidate) -> Mapping[ContentKey, Content]:
        """The read set as it was at the base."""
        if not candidate.read_set:
            return {}
        return self._client.contents(f"@{candidate.base_hash}", sorted(candidate.read_set))

    def send(self, plan: Plan, branch: str, more: Mapping[str, str] = MappingProxyType({})) -> str | None:
        """Commit the plan to `branch`; None when one of its keys has changed, or nobody can say."""
        entries = [one.publication() for one in plan.accepted]
        with _files_of(next(iter(plan.accepted))):
            operations = plan.operations()
        try:
            return self._client.commit(
                branch,
                expected_hash=plan.onto,
                operations=operations,
                message=message(entries),
                properties={**properties(entries), **more},
            ).hash
        except NessieConflict:
            plan.discard()
        except NessieOutcomeUnknown:
            # The files stay: the commit may be there, or still come. The ledger tells at the next attempt;
            # should it come after that, the keys have changed under it.
            return None
        return None

    def plan_one(self, candidate: Candidate) -> tuple[Plan | Refused, Published | None]:
        """A plan for one candidate whose checks are made on the result; or why there is none."""
        reads = self._reads(candidate)
        seen = self._client.contents_at(MAIN, _involved([candidate]))
        plan = Plan(seen.reference.hash, seen.contents, self._tables)
        for known in self._known([candidate], at=plan.onto).values():
            return plan, known
        with _files_of(candidate):
            refused = plan.add(candidate, reads, checked=True)
        if isinstance(refused, Refused):
            return explained(self._client, candidate, refused, at=plan.onto), None
        return plan, None


@contextmanager
def _files_of(candidate: Candidate) -> Iterator[None]:
    """A file that cannot be read concerns this candidate: it must not hold up the others, tick after tick."""
    try:
        yield
    except OSError as error:
        raise TableFilesUnreadable(
            f"Files of the table could not be read or written: {type(error).__name__}: {error}.",
            table=", ".join(candidate.tables),
            branch=candidate.branch,
            run_id=candidate.run_id,
            hint="If the store was away, the next tick tries again. If a file is gone, launch the run anew.",
        ) from error


def _involved(candidates: Iterable[Candidate]) -> list[ContentKey]:
    """All keys that a plan must look at: written, read, and the namespaces they live in."""
    own = {key for one in candidates for key in (*one.keys, *(one.read_set or ()))}
    return sorted(own | {ContentKey(key.parent) for key in own if key.parent})
