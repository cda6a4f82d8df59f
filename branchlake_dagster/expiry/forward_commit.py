"""Change one table by one forward commit on `main`, with attempts until the outcome is known.

Each attempt prepares a new state for the present hash of `main`, and commits it with this hash as the
expected one. If the table has changed meanwhile, the next attempt follows. Before another attempt, the log of
`main` is searched for a commit of the same call, in case only its reply was lost. Two commits of one call
cannot both succeed, because each expects an unchanged table.
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
    """A new state of a table. All its files are already written.

    `message` and `properties` are those of the commit. `discard` deletes the files that only this state
    needs. `ForwardCommit.run` returns `result` if the commit succeeds.
    """

    content: IcebergTable
    message: str
    properties: Mapping[str, str]
    discard: Callable[[], None]
    result: T


@dataclass(frozen=True)
class Unprepared(Generic[T]):
    """The table needs no commit. `ForwardCommit.run` returns `result`."""

    result: T


class ForwardCommit(Generic[T]):
    """Changes one table by one commit on `main`. Use each object for one call of `run`.

    `prepare` is called once for each attempt with the table's content on `main`, or None if `main` does not
    have the table. It returns the new state to commit, or `Unprepared` if no commit is needed.
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
        """The hash of `main` before the first commit was sent."""
        self._sent: PreparedTable[T] | None = None
        """The state that was sent to Nessie last."""

    def run(self) -> tuple[T, str | None]:
        """Commit the change. Return the result and the commit's hash (None if no commit was needed).

        Makes at most five attempts.

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
        """Prepare and commit once.

        Return the result of `run`; None if the table on `main` changed meanwhile.
        """
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
        """Return the hash of the commit that an earlier attempt made on `main`; None if it made none."""
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
