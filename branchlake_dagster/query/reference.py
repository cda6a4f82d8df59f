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
from branchlake_dagster.publication.ledger import publications_in
from branchlake_dagster.stored_names import LakeProperty, ReferencePrefix


class QueryFailed(BranchlakeError, Terminal):
    """The SQL cannot be run; the text quotes DuckDB."""


class TableNotThere(QueryFailed):
    """The SQL names a table that the lake does not have at that reference."""


class NoSuchState(BranchlakeError, Terminal):
    """No branch, run or moment of that name is in the lake."""


_RUN_ID = re.compile(r"[0-9a-f]{6}[0-9a-f-]{0,30}")
_HASH = re.compile(r"[0-9a-f]{8,64}")
_LISTED = "`branchlake status` lists branches, discarded runs and publications."


@dataclass(frozen=True)
class Where:
    """A state of the lake that does not move: `ref` is `name@hash`, `told` says in words what it is."""

    ref: str
    told: str

    @classmethod
    def find(
        cls,
        client: NessieClient,
        *,
        branch: str | None = None,
        run: str | None = None,
        at: str | datetime | None = None,
    ) -> Where:
        """The state that at most one of these names; `main` without any.

        `branch` is a branch, a tag or `name@hash`. `run` is a run's id or the first six or more characters of
        one. `at` is a moment (without a zone: UTC) or a commit hash of `main`, eight or more characters.
        Raises NoSuchState, ConfigurationError.
        """
        if sum(value is not None for value in (branch, run, at)) > 1:
            raise ConfigurationError("Only one of branch, run and at can be given.", reason="several_states")
        if run is not None:
            return _of_run(client, run)
        if at is not None:
            return _of_moment(client, at) if isinstance(at, datetime) else _of_text(client, at)
        return _of_branch(client, branch or MAIN)


def _pinned(reference: Reference, told: str) -> Where:
    return Where(f"{reference.name}@{reference.hash}", told)


def _of_branch(client: NessieClient, name: str) -> Where:
    if "@" in name:
        return Where(name, name)
    try:
        return _pinned(client.reference(name), name)
    except ReferenceNotFound as missing:
        raise NoSuchState(
            f"There is no branch or tag {name!r}.", hint=_LISTED, reason="no_reference", subject=name
        ) from missing


def _of_run(client: NessieClient, run: str) -> Where:
    """The run's branch; else what was discarded of it; else `main` as its publication left it."""
    prefix = run.strip().lower()
    if not _RUN_ID.fullmatch(prefix):
        raise ConfigurationError(
            f"{run!r} is no run id.",
            hint="Give six or more characters of its UUID.",
            reason="run_id",
            subject=run,
        )
    found = _references(client, prefix)
    for kind, told in (
        (ReferencePrefix.RUN, "on its branch"),
        (ReferencePrefix.DISCARDED, "as it was discarded"),
    ):
        names = [name for name in found if name.startswith(kind)]
        if len(names) > 1:
            raise ConfigurationError(f"{len(names)} runs begin with {run!r}.", hint="Give more of the id.")
        if names:
            return _pinned(found[names[0]], f"run {names[0].removeprefix(kind)}, {told}")
    published = _publication(client, prefix)
    if published is not None:
        return published
    if found:
        raise NoSuchState(
            f"The files of run {run} are being deleted.",
            hint="Launch it again.",
            reason="being_deleted",
            subject=run,
        )
    raise NoSuchState(
        f"Run {run} has no branch, was not published and is not discarded (any more).",
        hint=f"What a run left is deleted some time after it was discarded. {_LISTED}",
        reason="run_left_nothing",
        subject=run,
    )


def _references(client: NessieClient, prefix: str) -> dict[str, Reference]:
    kinds = "|".join((ReferencePrefix.RUN, ReferencePrefix.DISCARDED, ReferencePrefix.SWEEPING))
    filtered = client.references(filter=f"ref.name.matches('^({kinds}){prefix}')")
    return {reference.name: reference for reference in filtered}


def _publication(client: NessieClient, prefix: str) -> Where | None:
    name = LakeProperty.RUN_ID
    runs = f"'{name}' in commit.properties && commit.properties['{name}'].contains('{prefix}')"
    for entry in client.log(MAIN, filter=runs):
        for one in publications_in(entry):
            if one.run_id.startswith(prefix):
                return Where(f"{MAIN}@{one.hash}", f"run {one.run_id}, as it was published on main")
    return None


def _of_text(client: NessieClient, at: str) -> Where:
    text = at.strip()
    if _HASH.fullmatch(text.lower()):
        return _of_hash(client, text.lower())
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigurationError(
            f"{at!r} is neither a time nor a commit hash of main.",
            hint="Write 2026-11-20T12:00 (UTC), 2026-11-20T12:00+01:00, or eight characters of a hash.",
            reason="neither_time_nor_hash",
            subject=str(at),
        ) from error
    return _of_moment(client, moment)


def _of_moment(client: NessieClient, moment: datetime) -> Where:
    """The newest commit of `main` that is not younger. A moment without a zone is UTC, not the local time."""
    utc = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    text = utc.isoformat().replace("+00:00", "Z")
    # Nessie counts nanoseconds: a commit's own time, as Python has it, is a little before that commit.
    after = (utc + timedelta(microseconds=1)).isoformat()
    older = client.log(MAIN, filter=f"timestamp(commit.commitTime) < timestamp('{after}')", limit=1)
    found = next(iter(older), None)
    if found is None:
        raise NoSuchState(
            f"main has no commit as old as {text}.",
            hint="The lake was made later.",
            reason="before_first_commit",
            subject=text,
        )
    return Where(f"{MAIN}@{found.commit.hash}", f"main at {text} (commit {found.commit.hash[:16]})")


def _of_hash(client: NessieClient, text: str) -> Where:
    if len(text) == 64:
        try:
            list(client.log(f"{MAIN}@{text}", limit=1))
        except NessieNotFound as missing:
            raise _no_commit(text) from missing
        return Where(f"{MAIN}@{text}", f"main at commit {text[:16]}")
    found = list(client.log(MAIN, filter=f"commit.hash.startsWith('{text}')", limit=2))
    if not found:
        raise _no_commit(text)
    if len(found) > 1:
        raise ConfigurationError(f"Several commits of main begin with {text}.", hint="Give more of the hash.")
    return Where(f"{MAIN}@{found[0].commit.hash}", f"main at commit {found[0].commit.hash[:16]}")


def _no_commit(text: str) -> NoSuchState:
    return NoSuchState(f"main has no commit {text}.", hint=_LISTED, reason="no_commit", subject=text)
