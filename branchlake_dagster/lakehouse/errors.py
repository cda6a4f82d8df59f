"""The errors of the whole package, told apart by what the caller may do next.

Every error carries one marker. `Transient`: nothing happened, the same call may be made again.
`Terminal`: repeating cannot help. `OutcomeUnknown`: a change was asked for and the answer is missing,
so look before repeating. Retry policies ask for the marker and never read an error's text.
"""

# The class names are the words of the design ("refused", "conflict", "outcome unknown"), not ...Error.
# ruff: noqa: N818

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from branchlake_dagster.lakehouse.nessie.model import KeyConflict

_USERINFO = re.compile(r"(?<=://)[^/?#\s]*@")
_SHOWN = 5


def without_credentials(text: str) -> str:
    """`text` with the `user:password@` part of every URL in it replaced by `***@`."""
    return _USERINFO.sub("***@", text)


def _some(values: tuple[str, ...]) -> str:
    """The first few values, and how many more there are."""
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(values[:_SHOWN]) + more


class Transient:
    """Marker: certainly nothing was changed and the cause may pass; the same call may be repeated."""


class Terminal:
    """Marker: repeating the same call gives the same answer."""


class OutcomeUnknown:
    """Marker: a change was requested and its answer is missing; it may or may not have happened."""


class BranchlakeError(Exception):
    """Root of every error this package raises on purpose.

    `table` is a dotted name, `partitions` are printable partition names, `branch` a Nessie reference,
    `run_id` a Dagster run and `hint` one sentence that says what to do. All of them are attributes and
    part of the text. Instances survive pickling, because Dagster ships them between processes.
    """

    def __init__(
        self,
        message: str,
        *,
        table: str | None = None,
        partitions: Iterable[str] = (),
        branch: str | None = None,
        run_id: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(without_credentials(message))
        self.table = table
        self.partitions = tuple(partitions)
        self.branch = branch
        self.run_id = run_id
        self.hint = without_credentials(hint) if hint else None

    @property
    def message(self) -> str:
        """What happened, without the fields and the hint."""
        return str(self.args[0])

    def __str__(self) -> str:
        fields = (
            ("table", self.table),
            ("partitions", _some(self.partitions)),
            ("branch", self.branch),
            ("run", self.run_id),
        )
        where = ", ".join(f"{name} {value}" for name, value in fields if value)
        text = f"{self.message} [{where}]" if where else self.message
        return f"{text} {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Callable[..., BranchlakeError], tuple[Any, ...], dict[str, Any]]:
        # The default calls cls(*args), which loses keyword fields and fails where one is required.
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(cls: type[BranchlakeError], args: tuple[Any, ...]) -> BranchlakeError:
    error = cls.__new__(cls)
    error.args = args
    return error


def may_pass(error: BaseException) -> bool:
    """Whether the same work may succeed later without anybody's help.

    A lost answer is among them: whoever repeats looks first. So is whatever Nessie says of a state that
    others have changed meanwhile, and a refused token, which is the operator's to renew.
    """
    if isinstance(error, NessieError):
        return not isinstance(error, NessieRefused)
    if isinstance(error, OSError):
        return not isinstance(error, FileNotFoundError)
    return isinstance(error, Transient | OutcomeUnknown)


class ConfigurationError(BranchlakeError, Terminal):
    """A setting is missing or wrong; the text names it and a value that would do."""


class ReadOnlyReference(BranchlakeError, Terminal):
    """A change was asked for on a tag or a fixed hash; only branches can change."""


class Unsupported(BranchlakeError, Terminal, NotImplementedError):
    """The operation is refused on principle; the text says why and what to do instead."""


class NessieError(BranchlakeError):
    """A call to Nessie did not succeed.

    `status` is the HTTP status (None when no answer came), `code` the server's `errorCode`.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        table: str | None = None,
        partitions: Iterable[str] = (),
        branch: str | None = None,
        run_id: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, table=table, partitions=partitions, branch=branch, run_id=run_id, hint=hint)
        self.status = status
        self.code = code


class NessieRefused(NessieError, Terminal):
    """The server understood the request and will not do it (4xx without a class of its own)."""


class NotNessie(NessieRefused):
    """A whole answer that no Nessie gives, such as a proxy's page. Asked again first: such pages pass."""


class NessieUnauthorized(NessieError, Terminal):
    """The token is missing, expired or not allowed to do this (401, 403)."""


class NessieNotFound(NessieError, Terminal):
    """Something named in the request does not exist (404)."""


class ReferenceNotFound(NessieNotFound):
    """The branch, tag or hash does not exist."""


class ContentNotFound(NessieNotFound):
    """The reference exists and holds nothing under that key."""


class NessieAlreadyExists(NessieError, Terminal):
    """A branch or tag of that name exists already."""


class NessieConflict(NessieError, Terminal):
    """The change contradicts what happened since its expected hash (409).

    `conflicts` says which keys and why. A conflict without a key is about the reference itself
    (`UNEXPECTED_HASH`: it moved).
    """

    def __init__(
        self,
        message: str,
        *,
        conflicts: Iterable[KeyConflict] = (),
        status: int | None = 409,
        code: str | None = None,
        table: str | None = None,
        partitions: Iterable[str] = (),
        branch: str | None = None,
        run_id: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.conflicts = tuple(conflicts)
        listed = _some(tuple(str(conflict) for conflict in self.conflicts))
        super().__init__(
            f"{message} Conflicts: {listed}." if listed else message,
            status=status,
            code=code,
            table=table,
            partitions=partitions,
            branch=branch,
            run_id=run_id,
            hint=hint,
        )


class NessieUnavailable(NessieError, Transient):
    """The request was certainly not applied: no connection, 429, or a read that failed on the server."""


class NessieOutcomeUnknown(NessieError, OutcomeUnknown):
    """A change was sent and its answer was lost, late or a 5xx."""
