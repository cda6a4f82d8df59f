"""Changes one table by one forward commit on `main`, and repeats it until the outcome is known.

The commit expects the hash of `main` that it was prepared for. If the table has changed meanwhile, it is
prepared again. Before each attempt, the log of `main` is searched for a commit of the same call, so a lost
reply does no harm. Two commits of one call cannot both be made, because each expects the table unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar
from uuid import uuid4

from branchlake_dagster.errors import BranchlakeError, OutcomeUnknown, Transient
from branchlake_dagster.lakehouse.lakehouse import MAIN
from branchlake_dagster.nessie.client import NessieClient
from branchlake_dagster.nessie.errors import NessieConflict, NessieOutcomeUnknown
from branchlake_dagster.nessie.model import Content, ContentKey, IcebergTable, Put
from branchlake_dagster.stored_names import LakeProperty

_MAX_ATTEMPTS = 5
T = TypeVar("T")


class ExpiryContended(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """Other writers kept changing the table; nothing of it was expired or rewritten."""


class ExpiryUnknown(BranchlakeError, OutcomeUnknown):  # noqa: N818 - named like the other outcomes
    """The reply to an expiry's commit was lost, and `main` does not show yet whether it was made."""


@dataclass(frozen=True)
class PreparedTable(Generic[T]):
    """A new state of a table, of which all files are written.

    `properties` are those of the commit. `discard` deletes the files that only this state needs. `result` is
    what the caller gets if the commit is made.
    """

    content: IcebergTable
    message: str
    properties: Mapping[str, str]
    discard: Callable[[], None]
    result: T


@dataclass(frozen=True)
class Unprepared(Generic[T]):
    """The table needs no commit. `result` is what the caller gets."""

    result: T


class ForwardCommit(Generic[T]):
    """One call that changes one table.

    `prepare` gets the content of the table on `main`, or None if `main` does not have it. It is called once
    for each attempt.
    """

    def __init__(
        self,
        client: NessieClient,
        key: ContentKey,
        prepare: Callable[[Content | None], PreparedTable[T] | Unprepared[T]],
    ) -> None:
        self._client = client
        self._key = key
        self._prepare = prepare
        self._call_id = str(uuid4())
        self._since: str | None = None
        """`main` before the first commit was sent."""
        self._sent: PreparedTable[T] | None = None
        """The state that was sent last."""

    def run(self) -> tuple[T, str | None]:
        """Return the result and the commit; the commit is None if none was needed.

        Raises ExpiryContended, ExpiryUnknown, and the errors of Nessie and of `prepare`.
        """
        unknown_outcome: NessieOutcomeUnknown | None = None
        for _ in range(_MAX_ATTEMPTS):
            try:
                answer = self._try_commit()
            except NessieOutcomeUnknown as error:
                unknown_outcome = unknown_outcome or error
                continue
            except Exception as error:
                if unknown_outcome is None:
                    raise
                raise self._unknown_error() from error  # the earlier commit may exist, whatever failed now
            if answer is not None:
                return answer
        if unknown_outcome is not None:
            raise self._unknown_error() from unknown_outcome
        raise ExpiryContended(
            f"The table changed {_MAX_ATTEMPTS} times while its maintenance was prepared.",
            table=self._key.name,
            branch=MAIN,
            hint="Nothing was changed. The next maintenance tries again.",
        )

    def _try_commit(self) -> tuple[T, str | None] | None:
        """Prepare and commit once. Return None if `main` has changed the table meanwhile."""
        main = self._client.contents_at(MAIN, [self._key])
        if self._sent is not None and (commit := self._find_commit()) is not None:
            return self._sent.result, commit
        prepared = self._prepare(main.contents.get(self._key))
        if isinstance(prepared, Unprepared):
            return prepared.result, None
        self._since = self._since or main.reference.hash
        self._sent = prepared
        try:
            result = self._client.commit(
                MAIN,
                expected_hash=main.reference.hash,
                operations=[Put(self._key, prepared.content)],
                message=prepared.message,
                properties={**prepared.properties, LakeProperty.EXPIRY_ID: self._call_id},
            )
        except NessieOutcomeUnknown:
            raise  # keep the files: the commit may exist, or still arrive
        except NessieConflict:
            prepared.discard()
            return None
        except Exception:
            prepared.discard()
            raise
        return prepared.result, result.hash

    def _find_commit(self) -> str | None:
        """Find the commit of an earlier attempt whose reply was lost."""
        marker = (
            f"'{LakeProperty.EXPIRY_ID}' in commit.properties"
            f" && commit.properties['{LakeProperty.EXPIRY_ID}'] == '{self._call_id}'"
        )
        entry = next(iter(self._client.log(MAIN, since=self._since, filter=marker)), None)
        return entry.commit.hash if entry is not None else None

    def _unknown_error(self) -> ExpiryUnknown:
        return ExpiryUnknown(
            "The reply of Nessie to the commit of the table's maintenance was lost.",
            table=self._key.name,
            branch=MAIN,
            hint="Run the maintenance again: it continues from what main has then. No file was deleted.",
        )
