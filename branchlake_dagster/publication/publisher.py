"""Publishing: making passed branches visible on `main`, each wholly, exactly once, whatever is lost.

A branch whose keys nobody else touched is merged: one call. Where `main` has moved under a table, or the
run asked for serializable isolation, or several candidates want the same table, one commit is planned on
`main`'s present hash and sent expecting that hash. Both can be repeated after a lost reply: Nessie
recognises a merge that it has, and a commit is looked for in the ledger before it is planned again. Two
commits of one plan cannot both succeed, because each changes keys that the other expects unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from types import MappingProxyType

from branchlake_dagster.lakehouse.errors import (
    BranchlakeError,
    NessieConflict,
    NessieOutcomeUnknown,
    OutcomeUnknown,
    ReferenceNotFound,
    Transient,
)
from branchlake_dagster.lakehouse.lakehouse import MAIN, Lakehouse
from branchlake_dagster.lakehouse.nessie.client import NessieClient
from branchlake_dagster.lakehouse.nessie.model import Content, ContentKey, DiffEntry, Namespace
from branchlake_dagster.publication.candidate import (
    Candidate,
    NeedsChecks,
    Prepared,
    Published,
    Refused,
    Result,
)
from branchlake_dagster.publication.explain import explained
from branchlake_dagster.publication.ledger import Publication, properties, published
from branchlake_dagster.publication.rebase import Plan
from branchlake_dagster.publication.replay import IcebergTables, Tables

PUBLICATION_BRANCH_PREFIX = "publish-"
"""Branches on which a rebased state waits for its checks: `publish-{run_id}`."""

GROUP = 32
"""Most publications in one commit: bounds what is planned again when `main` moves meanwhile."""

REBASED = "branchlake.rebased"
"""On the commit of a prepared state: the tables whose changes were replayed."""

_ATTEMPTS = 5


class PublicationUnexplained(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """`main` is said to hold the candidate, and the ledger does not know it."""


class TableFilesUnreadable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Metadata or manifests of a table could not be read or written; nothing was published."""


class PublicationContended(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Others kept publishing into the same tables; nothing was published, and the next tick tries again."""


def publisher_of(lake: Lakehouse) -> Publisher:
    """The publisher of a lake's Iceberg tables."""
    return Publisher(lake.nessie, IcebergTables(lake.catalog()))


class Publisher:
    """Publishes candidates. Several publishers may run at once, in one process or many."""

    def __init__(self, client: NessieClient, tables: Tables) -> None:
        self._client = client
        self._tables = tables

    def publish(self, candidates: Sequence[Candidate]) -> dict[str, Result | BranchlakeError]:
        """The result for each candidate by branch; an error where there is none yet.

        Safe to call again after any failure. An error that is Transient or OutcomeUnknown means "again",
        and the failure of one group of candidates does not hold up another.
        """
        results: dict[str, Result | BranchlakeError] = {}
        for group in _groups(candidates):
            try:
                results |= self._group(group)
            except BranchlakeError as error:
                results |= {one.branch: error for one in group}
        return results

    def known(self, branch: str, base_hash: str) -> Published | None:
        """The publication of a branch that was made from `base_hash`, if the ledger has one."""
        found = published(self._client, [branch], at=MAIN, since=base_hash).get(branch)
        return Published(found.hash, now=False) if found else None

    def _group(self, group: Sequence[Candidate]) -> Mapping[str, Result | BranchlakeError]:
        """Candidates that share keys. One alone is merged if it can be."""
        only = group[0]
        # Nessie 0.99 merges a rename as a deletion: the table was lost. A commit of ours carries it over.
        if len(group) == 1 and not only.serializable and not only.renames:
            merged = self._merge(only.branch, only.head_hash, only.publication())
            if merged is not None:
                return {only.branch: merged}
        found: dict[str, Result | BranchlakeError] = {}
        waiting = iter(group)
        while batch := list(islice(waiting, GROUP)):
            found |= self._commit(batch)
        return found

    # -- one merge -------------------------------------------------------------------------------------

    def _merge(self, branch: str, head_hash: str, publication: Publication) -> Published | None:
        """Merge a branch into `main`; None when `main` changed one of its keys since."""
        try:
            result = self._client.merge(
                from_name=branch,
                from_hash=head_hash,
                into=MAIN,
                # Any hash of main will do: Nessie compares from the common ancestor. This one is at hand.
                expected_hash=publication.base_hash,
                message=_message([publication]),
                properties=properties([publication]),
            )
        except NessieConflict:
            # Of a dropped namespace Nessie tells by an error, as it does when it lost a race with itself.
            return None
        if result.applied:
            return Published(result.target_hash)
        if not result.successful:
            return None
        found = self.known(branch, publication.base_hash)
        if found is None:
            # Merged by hand, or not at all: Nessie answers the same. Saying "published" would be a guess.
            raise PublicationUnexplained(
                "Nessie says that main holds this branch, but main's log has no publication of it.",
                branch=publication.branch,
                run_id=publication.run_id,
                hint="Look at main's log for who merged it; if its rows are there, delete the branch.",
            )
        return found

    # -- one commit for several ------------------------------------------------------------------------

    def _commit(self, batch: Sequence[Candidate]) -> dict[str, Result | BranchlakeError]:
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
            hash_ = self._send(plan, MAIN)
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

    def _send(self, plan: Plan, branch: str, more: Mapping[str, str] = MappingProxyType({})) -> str | None:
        """Commit the plan to `branch`; None when one of its keys has changed, or nobody can say."""
        entries = [one.publication() for one in plan.accepted]
        with _files_of(next(iter(plan.accepted))):
            operations = plan.operations()
        try:
            return self._client.commit(
                branch,
                expected_hash=plan.onto,
                operations=operations,
                message=_message(entries),
                properties={**properties(entries), **more},
            ).hash
        except NessieConflict:
            plan.discard()
        except NessieOutcomeUnknown:
            # The files stay: the commit may be there, or still come. The ledger tells at the next attempt;
            # should it come after that, the keys have changed under it.
            return None
        return None

    # -- a rebased state that must be checked first ----------------------------------------------------

    def prepare(self, candidate: Candidate) -> Prepared | Published | Refused:
        """Put the rebased candidate on a branch of its own, for the checks on its whole tables to run on."""
        name = publication_branch(candidate.run_id)
        plan, known = self._plan_one(candidate)
        if not isinstance(plan, Plan):
            return plan
        if known is not None:
            return known
        self.forget(candidate.run_id)
        self._client.create_branch(name, from_ref=MAIN, from_hash=plan.onto)
        tables = next(iter(plan.accepted.values()))
        hash_ = self._send(plan, name, {REBASED: ",".join(tables)})
        if hash_ is None:
            raise PublicationContended(
                "The rebased state could not be stored for its checks.",
                branch=name,
                run_id=candidate.run_id,
                hint="Nothing is lost: the next tick of the publication sensor tries again.",
            )
        return Prepared(name, hash_, plan.onto, tables)

    def prepared(self, run_id: str) -> Prepared | None:
        """What `prepare` of this or an earlier process has put there; None when there is nothing whole."""
        name = publication_branch(run_id)
        try:
            (entry,) = self._client.log(name, limit=1)
        except ReferenceNotFound:
            return None
        rebased = entry.commit.properties.get(REBASED)
        if rebased is None:
            return None  # it died between the branch and the commit
        onto = entry.commit.parent_hashes[0]
        return Prepared(name, entry.commit.hash, onto, tuple(filter(None, rebased.split(","))))

    def publish_prepared(self, candidate: Candidate, prepared: Prepared) -> Published | Refused | None:
        """Publish exactly the state that was checked; None when `main` has moved under it since."""
        changes = tuple(self._client.diff(f"@{prepared.onto}", f"@{prepared.hash}"))
        checked = replace(candidate, changes=changes)
        plan, known = self._plan_one(checked)
        if not isinstance(plan, Plan):
            return plan
        if known is not None:
            return known
        if plan.accepted[checked]:
            plan.discard()
            return None
        hash_ = self._send(plan, MAIN)
        return Published(hash_, rebased=prepared.tables) if hash_ else None

    def forget(self, run_id: str) -> None:
        """Delete the branch of a prepared state, if there is one."""
        name = publication_branch(run_id)
        try:
            self._client.delete_branch(name, expected_hash=self._client.reference(name).hash)
        except ReferenceNotFound:
            return

    def _plan_one(self, candidate: Candidate) -> tuple[Plan | Refused, Published | None]:
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


def publication_branch(run_id: str) -> str:
    """Where the rebased state of a run waits for its checks."""
    return f"{PUBLICATION_BRANCH_PREFIX}{run_id}"


def _message(publications: Sequence[Publication]) -> str:
    tables = ", ".join(dict.fromkeys(table for one in publications for table in one.tables))
    runs = ", ".join(one.run_id for one in publications)
    return (
        f"Publish {tables} from run {runs}"
        if len(publications) == 1
        else f"Publish {tables} from runs {runs}"
    )


def _groups(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Candidates that change a common key together, in their order."""
    groups: list[tuple[set[ContentKey], list[Candidate]]] = []
    for candidate in candidates:
        # Two branches that made one namespace do not collide: a merge takes either.
        keys = {entry.key for entry in candidate.changes if not _is_namespace(entry)}
        members = [candidate]
        for group in [group for group in groups if group[0] & keys]:
            groups.remove(group)
            keys |= group[0]
            members = [*group[1], *members]
        groups.append((keys, members))
    return [members for _, members in groups]


def _involved(candidates: Iterable[Candidate]) -> list[ContentKey]:
    """All keys that a plan must look at: written, read, and the namespaces they live in."""
    own = {key for one in candidates for key in (*one.keys, *(one.read_set or ()))}
    return sorted(own | {ContentKey(key.parent) for key in own if key.parent})


def _is_namespace(entry: DiffEntry) -> bool:
    return isinstance(entry.to_content or entry.from_content, Namespace)
