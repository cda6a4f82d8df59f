"""The state of the lake that a query reads: `main`, a branch, a tag, a run, or an earlier `main`."""

# Named like the other outcomes of the package.
# ruff: noqa: N818

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieNotFound, ReferenceNotFound
from branchlake_dagster.nessie.model import Reference
from branchlake_dagster.publication.ledger import parse_publications
from branchlake_dagster.stored_names import LakeProperty, ReferencePrefix


class QueryFailed(BranchlakeError, Terminal):
    """The SQL cannot be run; the message quotes DuckDB."""


class TableNotThere(QueryFailed):
    """The SQL names a table that does not exist at that state of the lake."""


class NoSuchState(BranchlakeError, Terminal):
    """The lake does not have a branch, run or time of that name."""


_RUN_ID = re.compile(r"[0-9a-f]{6}[0-9a-f-]{0,30}")
_HASH = re.compile(r"[0-9a-f]{8,64}")
_LIST_HINT = "`branchlake status` lists branches, discarded runs and publications."


@dataclass(frozen=True)
class LakeState:
    """A fixed state of the lake: `ref` is `name@hash`, and `label` describes it in messages."""

    ref: str
    label: str

    @classmethod
    def find(
        cls,
        client: NessieClient,
        *,
        branch: str | None = None,
        run: str | None = None,
        at: str | datetime | None = None,
    ) -> LakeState:
        """Find the state that one of the arguments names; without arguments, `main`.

        `branch` is a branch, a tag or `name@hash`. `run` is a run's id, or its first six or more characters.
        `at` is a time (UTC if it has no zone), or a commit hash of `main` of eight or more characters.

        Raises NoSuchState, and ConfigurationError for more than one argument or an invalid one.
        """
        if sum(value is not None for value in (branch, run, at)) > 1:
            raise ConfigurationError("Give only one of branch, run and at.", reason="several_states")
        if run is not None:
            return _find_by_run(client, run)
        if at is not None:
            return (
                _find_by_time(client, at) if isinstance(at, datetime) else _find_by_time_or_hash(client, at)
            )
        return _find_by_branch(client, branch or MAIN)


def _pin_reference(reference: Reference, label: str) -> LakeState:
    return LakeState(f"{reference.name}@{reference.hash}", label)


def _find_by_branch(client: NessieClient, name: str) -> LakeState:
    if "@" in name:
        return LakeState(name, name)
    try:
        return _pin_reference(client.reference(name), name)
    except ReferenceNotFound as missing:
        raise NoSuchState(
            f"The branch or tag {name!r} does not exist.",
            hint=_LIST_HINT,
            reason="no_reference",
            subject=name,
        ) from missing


def _find_by_run(client: NessieClient, run: str) -> LakeState:
    """Find the run's branch; else its discarded branch; else `main` as its publication left it."""
    prefix = run.strip().lower()
    if not _RUN_ID.fullmatch(prefix):
        raise ConfigurationError(
            f"{run!r} is not a run id.",
            hint="Give the first six or more characters of the run's UUID.",
            reason="run_id",
            subject=run,
        )
    references = _load_references(client, prefix)
    for name_prefix, label in (
        (ReferencePrefix.RUN, "on its branch"),
        (ReferencePrefix.DISCARDED, "as it was discarded"),
    ):
        names = [name for name in references if name.startswith(name_prefix)]
        if len(names) > 1:
            raise ConfigurationError(
                f"{len(names)} runs begin with {run!r}.", hint="Give more characters of the id."
            )
        if names:
            return _pin_reference(references[names[0]], f"run {names[0].removeprefix(name_prefix)}, {label}")
    published_state = _find_publication(client, prefix)
    if published_state is not None:
        return published_state
    if references:
        raise NoSuchState(
            f"The files of run {run} are being deleted.",
            hint="Launch the run again.",
            reason="being_deleted",
            subject=run,
        )
    raise NoSuchState(
        f"Run {run} was not published, and its branch was discarded and deleted, or never existed.",
        hint=f"A discarded branch is deleted after BRANCHLAKE_DISCARD_GRACE_H hours. {_LIST_HINT}",
        reason="run_left_nothing",
        subject=run,
    )


def _load_references(client: NessieClient, prefix: str) -> dict[str, Reference]:
    kinds = "|".join((ReferencePrefix.RUN, ReferencePrefix.DISCARDED, ReferencePrefix.SWEEPING))
    matches = client.references(filter=f"ref.name.matches('^({kinds}){prefix}')")
    return {reference.name: reference for reference in matches}


def _find_publication(client: NessieClient, prefix: str) -> LakeState | None:
    name = LakeProperty.RUN_ID
    commit_filter = f"'{name}' in commit.properties && commit.properties['{name}'].contains('{prefix}')"
    for entry in client.log(MAIN, filter=commit_filter):
        for publication in parse_publications(entry):
            if publication.run_id.startswith(prefix):
                return LakeState(
                    f"{MAIN}@{publication.hash}", f"run {publication.run_id}, as it was published on main"
                )
    return None


def _find_by_time_or_hash(client: NessieClient, at: str) -> LakeState:
    value = at.strip()
    if _HASH.fullmatch(value.lower()):
        return _find_by_hash(client, value.lower())
    try:
        moment = datetime.fromisoformat(value)
    except ValueError as error:
        raise ConfigurationError(
            f"{at!r} is neither a time nor a commit hash of main.",
            hint="Write 2026-11-20T12:00 (UTC), 2026-11-20T12:00+01:00, or eight characters of a hash.",
            reason="neither_time_nor_hash",
            subject=str(at),
        ) from error
    return _find_by_time(client, moment)


def _find_by_time(client: NessieClient, moment: datetime) -> LakeState:
    """Find the newest commit of `main` at that time. A time without a zone is UTC, not local time."""
    utc = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    formatted_time = utc.isoformat().replace("+00:00", "Z")
    # Nessie counts nanoseconds. Python cuts a commit's time to microseconds, a little before that commit.
    after = (utc + timedelta(microseconds=1)).isoformat()
    older_commits = client.log(MAIN, filter=f"timestamp(commit.commitTime) < timestamp('{after}')", limit=1)
    entry = next(iter(older_commits), None)
    if entry is None:
        raise NoSuchState(
            f"The first commit of main is younger than {formatted_time}.",
            hint="Give a later time. `branchlake status` lists publications.",
            reason="before_first_commit",
            subject=formatted_time,
        )
    return LakeState(
        f"{MAIN}@{entry.commit.hash}", f"main at {formatted_time} (commit {entry.commit.hash[:16]})"
    )


def _find_by_hash(client: NessieClient, commit_hash: str) -> LakeState:
    if len(commit_hash) == 64:
        try:
            list(client.log(f"{MAIN}@{commit_hash}", limit=1))
        except NessieNotFound as missing:
            raise _no_such_commit(commit_hash) from missing
        return LakeState(f"{MAIN}@{commit_hash}", f"main at commit {commit_hash[:16]}")
    entries = list(client.log(MAIN, filter=f"commit.hash.startsWith('{commit_hash}')", limit=2))
    if not entries:
        raise _no_such_commit(commit_hash)
    if len(entries) > 1:
        raise ConfigurationError(
            f"Several commits of main begin with {commit_hash}.", hint="Give more characters of the hash."
        )
    return LakeState(f"{MAIN}@{entries[0].commit.hash}", f"main at commit {entries[0].commit.hash[:16]}")


def _no_such_commit(commit_hash: str) -> NoSuchState:
    return NoSuchState(
        f"main does not contain the commit {commit_hash}.",
        hint=_LIST_HINT,
        reason="no_commit",
        subject=commit_hash,
    )
