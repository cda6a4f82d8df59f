"""The errors of calls to Nessie."""

# The class names are terms of the design ("refused", "conflict", "outcome unknown") without the suffix Error.
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
    """A call to Nessie failed.

    `status` is the HTTP status, or None if no answer came. `code` is the server's `errorCode`.
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
    """The server understood the request and refused it (a 4xx status without a more specific class)."""


class NotNessie(NessieRefused):
    """The answer is complete, but not from Nessie: a proxy's page, for example. The call is retried first."""


class NessieUnauthorized(NessieError, Terminal):
    """The token is missing, expired or lacks the permission (401, 403)."""


class NessieNotFound(NessieError, Terminal):
    """Something that the request names does not exist (404)."""


class ReferenceNotFound(NessieNotFound):
    """The branch, tag or hash does not exist."""


class ContentNotFound(NessieNotFound):
    """The reference exists, but it has no content under that key."""


class NessieAlreadyExists(NessieError, Terminal):
    """A branch or tag of that name exists already."""


class NessieConflict(NessieError, Terminal):
    """The change conflicts with other changes since its expected hash (409).

    `conflicts` lists the keys and the reasons. A conflict without a key concerns the reference itself
    (`UNEXPECTED_HASH`: the reference has moved).
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
    """A change was sent, but its answer was lost, came too late or was a 5xx status."""


def may_succeed_later(error: BaseException) -> bool:
    """Return whether the same work may succeed later without a change of code or settings.

    True for lost answers, because callers read the present state before they repeat a change. True as well
    for answers about a state that other writers changed meanwhile, and for a refused token, which an operator
    can renew.
    """
    if isinstance(error, NessieError):
        return not isinstance(error, NessieRefused)
    if isinstance(error, OSError):
        return not isinstance(error, FileNotFoundError)
    return isinstance(error, Transient | OutcomeUnknown)
