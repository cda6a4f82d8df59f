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

_USERINFO = re.compile(r"(?<=://)[^/?#\s]*@")
_SHOWN = 5


def without_credentials(text: str) -> str:
    """`text` with the `user:password@` part of every URL in it replaced by `***@`."""
    return _USERINFO.sub("***@", text)


def some(values: tuple[str, ...]) -> str:
    """The first few values, and how many more there are, for an error's text."""
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
            ("partitions", some(self.partitions)),
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


class ConfigurationError(BranchlakeError, Terminal):
    """A setting is missing or wrong; the text names it and a value that would do."""


class ReadOnlyReference(BranchlakeError, Terminal):
    """A change was asked for on a tag or a fixed hash; only branches can change."""


class Unsupported(BranchlakeError, Terminal, NotImplementedError):
    """The operation is refused on principle; the text says why and what to do instead."""
