"""The errors of calls to Nessie."""

# The class names are the words of the design ("refused", "conflict", "outcome unknown"), not ...Error.
# ruff: noqa: N818

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from branchlake_dagster.errors import (
    BranchlakeError,
    OutcomeUnknown,
    Terminal,
    Transient,
    format_first_values,
)

if TYPE_CHECKING:
    from branchlake_dagster.nessie.model import KeyConflict


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
        **where: Any,
    ) -> None:
        super().__init__(message, **where)
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
        **where: Any,
    ) -> None:
        self.conflicts = tuple(conflicts)
        conflict_list = format_first_values(tuple(str(conflict) for conflict in self.conflicts))
        super().__init__(
            f"{message} Conflicts: {conflict_list}." if conflict_list else message,
            status=status,
            code=code,
            **where,
        )


class NessieUnavailable(NessieError, Transient):
    """The request was certainly not applied: no connection, 429, or a read that failed on the server."""


class NessieOutcomeUnknown(NessieError, OutcomeUnknown):
    """A change was sent and its answer was lost, late or a 5xx."""


def may_succeed_later(error: BaseException) -> bool:
    """Whether the same work may succeed later without anybody's help.

    A lost answer is among them: whoever repeats looks first. So is whatever Nessie says of a state that
    others have changed meanwhile, and a refused token, which is the operator's to renew.
    """
    if isinstance(error, NessieError):
        return not isinstance(error, NessieRefused)
    if isinstance(error, OSError):
        return not isinstance(error, FileNotFoundError)
    return isinstance(error, Transient | OutcomeUnknown)
