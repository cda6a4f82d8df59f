"""Which state of the lake is read: `main`, a branch, a tag, a run, or `main` as it was."""

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
    """The SQL cannot be run; the text quotes DuckDB."""


class TableNotThere(QueryFailed):
    """The SQL names a table that the lake does not have at that reference."""


class NoSuchState(BranchlakeError, Terminal):
    """No branch, run or moment of that name is in the lake."""


_RUN_ID = re.compile(r"[0-9a-f]{6}[0-9a-f-]{0,30}")
_HASH = re.compile(r"[0-9a-f]{8,64}")
_LIST_HINT = "`branchlake status` lists branches, discarded runs and publications."


@dataclass(frozen=True)
class LakeState:
    """A state of the lake that does not move: `ref` is `name@hash`, `label` says in words what it is."""

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
        """The state that at most one of these names; `main` without any.

        `branch` is a branch, a tag or `name@hash`. `run` is a run's id or the first six or more characters of
        one. `at` is a moment (without a zone: UTC) or a commit hash of `main`, eight or more characters.
        Raises NoSuchState, ConfigurationError.
        """
        if sum(value is not None for value in (branch, run, at)) > 1:
            raise ConfigurationError("Only one of branch, run and at can be given.", reason="several_states")
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
            f"There is no branch or tag {name!r}.", hint=_LIST_HINT, reason="no_reference", subject=name
        ) from missing


def _find_by_run(client: NessieClient, run: str) -> LakeState:
    """The run's branch; else what was discarded of it; else `main` as its publication left it."""
    prefix = run.strip().lower()
    if not _RUN_ID.fullmatch(prefix):
        raise ConfigurationError(
            f"{run!r} is no run id.",
            hint="Give six or more characters of its UUID.",
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
            raise ConfigurationError(f"{len(names)} runs begin with {run!r}.", hint="Give more of the id.")
        if names:
            return _pin_reference(references[names[0]], f"run {names[0].removeprefix(name_prefix)}, {label}")
    published_state = _find_publication(client, prefix)
    if published_state is not None:
        return published_state
    if references:
        raise NoSuchState(
            f"The files of run {run} are being deleted.",
            hint="Launch it again.",
            reason="being_deleted",
            subject=run,
        )
    raise NoSuchState(
        f"Run {run} has no branch, was not published and is not discarded (any more).",
        hint=f"What a run left is deleted some time after it was discarded. {_LIST_HINT}",
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
    """The newest commit of `main` that is not younger. A moment without a zone is UTC, not the local time."""
    utc = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    formatted_time = utc.isoformat().replace("+00:00", "Z")
    # Nessie counts nanoseconds: a commit's own time, as Python has it, is a little before that commit.
    after = (utc + timedelta(microseconds=1)).isoformat()
    older_commits = client.log(MAIN, filter=f"timestamp(commit.commitTime) < timestamp('{after}')", limit=1)
    entry = next(iter(older_commits), None)
    if entry is None:
        raise NoSuchState(
            f"main has no commit as old as {formatted_time}.",
            hint="The lake was made later.",
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
            f"Several commits of main begin with {commit_hash}.", hint="Give more of the hash."
        )
    return LakeState(f"{MAIN}@{entries[0].commit.hash}", f"main at commit {entries[0].commit.hash[:16]}")


def _no_such_commit(commit_hash: str) -> NoSuchState:
    return NoSuchState(
        f"main has no commit {commit_hash}.", hint=_LIST_HINT, reason="no_commit", subject=commit_hash
    )
