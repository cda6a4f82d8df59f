"""The errors of the whole package, told apart by what the caller may do next.

Every error carries one marker. `Transient`: nothing happened, the same call may be made again.
`Terminal`: repeating cannot help. `OutcomeUnknown`: a change was asked for and the answer is missing,
so look before repeating. Retry policies ask for the marker and never read an error's text.

Where one class has several causes, `reason` tells them apart by a code (in snake case, or as another
system names it), and `subject` names what the error is about if that is not a table, partition, branch or
run. Neither is part of the text, so sentences may be rewritten at any time: code and tests use the class and
its fields only.
"""

# The class names are the words of the design ("refused", "conflict", "outcome unknown"), not ...Error.
# ruff: noqa: N818

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from branchlake_dagster.wording import agree

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
    """Marker: certainly nothing was changed and the cause may pass; the same call may be repeated.

    Examples:
        .. code-block:: python

            try:
                lake.nessie.reference("main")
            except Transient as error:  # Nessie is away, or answers with 503
                raise dg.RetryRequested(max_retries=3, seconds_to_wait=5) from error
    """


class Terminal:
    """Marker: repeating the same call gives the same answer.

    Examples:
        .. code-block:: python

            try:
                lake.catalog("main").create_namespace(("shop",))
            except Terminal as error:  # refused, not found, misconfigured: it needs somebody
                raise dg.Failure(str(error), allow_retries=False) from error
    """


class OutcomeUnknown:
    """Marker: a change was requested and its answer is missing; it may or may not have happened.

    Look before repeating.

    Examples:
        .. code-block:: python

            try:
                lake.nessie.delete_tag("release-1", expected_hash=known)
            except OutcomeUnknown:
                there = {ref.name for ref in lake.nessie.references()}
                if "release-1" in there:
                    lake.nessie.delete_tag("release-1", expected_hash=known)
    """


class BranchlakeError(Exception):
    """Root of every error this package raises on purpose.

    All arguments are attributes, and all but `reason` and `subject` are part of the text. Passwords in URLs
    are taken out. Instances survive pickling, because Dagster ships them between processes. Each is one of
    `Transient`, `Terminal` or `OutcomeUnknown` as well, which says what may be done next.

    Args:
        message (str): What happened, in a sentence.
        table (Optional[str]): The dotted name of the table that it happened to.
        partitions (Iterable[str]): Printable names of its partitions.
        branch (Optional[str]): The Nessie reference.
        run_id (Optional[str]): The Dagster run.
        hint (Optional[str]): One sentence that says what to do.
        reason (Optional[str]): A code for the cause, such as `unknown_setting`, where the class has several.
        subject (Optional[str]): The setting, column, topic, file or asset that is wrong.

    Examples:
        .. code-block:: python

            try:
                rows = lake.catalog(f"run-{run_id}").load_table(("shop", "prices")).scan().to_arrow()
            except BranchlakeError as error:
                context.log.error("%s (table %s): %s", error.message, error.table, error.hint)
                raise
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
        reason: str | None = None,
        subject: str | None = None,
    ) -> None:
        super().__init__(without_credentials(message))
        self.table = table
        self.partitions = tuple(partitions)
        self.branch = branch
        self.run_id = run_id
        self.hint = without_credentials(hint) if hint else None
        self.reason = reason
        self.subject = None if subject is None else without_credentials(subject)

    @property
    def message(self) -> str:
        """What happened, without the fields and the hint."""
        return str(self.args[0])

    def __str__(self) -> str:
        fields = (
            ("table", self.table),
            (agree(len(self.partitions), "partition", "partitions"), some(self.partitions)),
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


def all_of(calls: Iterable[Callable[[], object]]) -> None:
    """Make all calls, whatever becomes of the others. Raises the first error, the others as its notes."""
    errors: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"And after it {type(other).__name__}: {other}")
        raise errors[0]


class ConfigurationError(BranchlakeError, Terminal):
    """A setting is missing or wrong; the text names it and a value that would do."""


class SecretWithoutTls(ConfigurationError):
    """A secret would go over a network in clear, so it is not sent.

    Args:
        secrets (Iterable[str]): What would be sent, each with the setting that it is from; never a value.

    """

    def __init__(self, message: str, *, secrets: Iterable[str] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.secrets = tuple(secrets)


class ReadOnlyReference(BranchlakeError, Terminal):
    """A change was asked for on a tag or a fixed hash; only branches can change."""


class Unsupported(BranchlakeError, Terminal, NotImplementedError):
    """The operation is refused on principle; the text says why and what to do instead."""
