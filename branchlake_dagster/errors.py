"""The errors of branchlake. The class of an error shows what the caller may do next.

Every error has one of three markers:

- `Transient`: nothing was changed, and the same call may be repeated.
- `Terminal`: repeating the call cannot help.
- `OutcomeUnknown`: a change was requested and the answer is missing. Read the state before you repeat the
  call.

Retry policies use the marker and never the message.

If a class has several causes, `reason` is a code for the cause, in snake case or in the spelling of another
system. `subject` names the wrong object if this object is not a table, partition, branch or run. Neither
field is part of the message. Code and tests use only the class and the fields of an error, so messages may
change at any time.
"""

# Class names are the terms of the design ("refused", "conflict", "outcome unknown") and do not end in Error.
# ruff: noqa: N818

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from branchlake_dagster.wording import pluralize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from branchlake_dagster.automation.backfill_comparison import EarlierStateLost
    from branchlake_dagster.backup.errors import (
        BackupDamaged,
        BackupFailed,
        NotBackedUpHere,
        RestoreRefused,
    )
    from branchlake_dagster.catalog.stored_files import StoredFileDamaged
    from branchlake_dagster.checks.constraints import CheckFailedToRun, ContractError
    from branchlake_dagster.cleanup.jobs import NotOurs, RunsUnreadable
    from branchlake_dagster.cleanup.sweep_plan import BaseUnknown, StateUnreadable
    from branchlake_dagster.cleanup.sweeper import FilesNotDeleted
    from branchlake_dagster.compaction.errors import (
        CompactionContended,
        CompactionNotClean,
        CompactionRowsDiffer,
        CompactionUnknown,
        RewriteFailed,
    )
    from branchlake_dagster.embedded.jars import DownloadFailed, JarRefused
    from branchlake_dagster.embedded.process import ServerDidNotStart
    from branchlake_dagster.embedded.state_folder import LakeMoved, LakeNotRunning
    from branchlake_dagster.expiry.forward_commit import ExpiryContended, ExpiryUnknown
    from branchlake_dagster.expiry.roots import ConsumersUnreadable
    from branchlake_dagster.expiry.snapshot_expiry import ExpiryInvalid
    from branchlake_dagster.extras import MissingExtra
    from branchlake_dagster.garbage_collection.journal import JournalContended, JournalLost
    from branchlake_dagster.garbage_collection.reachable_files import RootsUnreadable
    from branchlake_dagster.garbage_collection.shared_warehouse import WarehouseShared
    from branchlake_dagster.garbage_collection.warehouse_files import WarehouseUnreadable
    from branchlake_dagster.history.change import ChangeLost, RowsUnreadable
    from branchlake_dagster.ingest.batch_tables import TypesUnknown
    from branchlake_dagster.ingest.errors import (
        AnotherIngestion,
        ColumnsUnknown,
        ConsumerGroupActive,
        DeadLettersLeftOut,
        EarlierAttemptLate,
        IngestError,
        KafkaRefused,
        KafkaUnavailable,
        LandingUnavailable,
        PositionLost,
        RecordsDeleted,
        RecordsUnread,
        RowsNotIdentified,
        StartOffsetsMissing,
        StartOffsetsOutOfRange,
        Superseded,
        TableTooNarrow,
        TooManyDeadLetters,
        TopicChanged,
        TopicReplaced,
    )
    from branchlake_dagster.nessie.errors import (
        ContentNotFound,
        NessieAlreadyExists,
        NessieConflict,
        NessieError,
        NessieNotFound,
        NessieOutcomeUnknown,
        NessieRefused,
        NessieUnauthorized,
        NessieUnavailable,
        NotNessie,
        ReferenceNotFound,
    )
    from branchlake_dagster.publication.column_changes import ColumnChangeRefused
    from branchlake_dagster.publication.ledger import BaseNotOnMain
    from branchlake_dagster.publication.publisher import PublicationContended, PublicationUnexplained
    from branchlake_dagster.publication.replay import (
        ReplayImpossible,
        TableFilesDamaged,
        TableFilesMissing,
        TableFilesUnreadable,
    )
    from branchlake_dagster.publication.run_publication import NotPublished, RunUnknown
    from branchlake_dagster.publication.unpublished_runs import AlertFailed
    from branchlake_dagster.query.reference import MomentExpired, NoSuchState, QueryFailed, TableNotThere
    from branchlake_dagster.receivers.kafka_sink import BrokerRefused, BrokerUnreachable
    from branchlake_dagster.receivers.landing import LandingDamaged, OffsetsGone
    from branchlake_dagster.receivers.records import NotConfirmed, NotHandedOver, PartitionTaken
    from branchlake_dagster.runs.heartbeats import HeartbeatsUnreadable
    from branchlake_dagster.spark.session import SparkGone
    from branchlake_dagster.tables.errors import (
        ColumnsFrozen,
        ColumnUnsupported,
        ForeignSession,
        InputColumnGone,
        InvalidCheckRun,
        LeaseHeld,
        LeaseLost,
        NotApproved,
        OneLakeOnly,
        PartitionMismatch,
        PositionUnreadable,
        ReadsUnknown,
        RetryNeedsFullRun,
        RowsRemoved,
        RunBranchGone,
        SchemaMismatch,
        TableMissing,
        UnsupportedType,
        UpsertKeyInvalid,
    )
    from branchlake_dagster.tables.table_files import FileUnreadable
    from branchlake_dagster.undo.find_publication import (
        PublicationDamaged,
        PublicationNotFound,
        UndoNotReversible,
    )
    from branchlake_dagster.undo.publication_undo import UndoContended, UndoUnknown
    from branchlake_dagster.undo.result import UndoRefused
    from branchlake_dagster.undo.undrop import DroppedTableUnreadable, TableNotDropped

__all__ = [
    "AlertFailed",
    "AnotherIngestion",
    "BackupDamaged",
    "BackupFailed",
    "BaseNotOnMain",
    "BaseUnknown",
    "BranchlakeError",
    "BrokerRefused",
    "BrokerUnreachable",
    "ChangeLost",
    "CheckFailedToRun",
    "ColumnChangeRefused",
    "ColumnUnsupported",
    "ColumnsFrozen",
    "ColumnsUnknown",
    "CompactionContended",
    "CompactionNotClean",
    "CompactionRowsDiffer",
    "CompactionUnknown",
    "ConfigurationError",
    "ConsumerGroupActive",
    "ConsumersUnreadable",
    "ContentNotFound",
    "ContractError",
    "DeadLettersLeftOut",
    "DownloadFailed",
    "DroppedTableUnreadable",
    "EarlierAttemptLate",
    "EarlierStateLost",
    "ExpiryContended",
    "ExpiryInvalid",
    "ExpiryUnknown",
    "FileUnreadable",
    "FilesNotDeleted",
    "ForeignSession",
    "HeartbeatsUnreadable",
    "IngestError",
    "InputColumnGone",
    "InvalidCheckRun",
    "JarRefused",
    "JournalContended",
    "JournalLost",
    "KafkaRefused",
    "KafkaUnavailable",
    "LakeMoved",
    "LakeNotRunning",
    "LandingDamaged",
    "LandingUnavailable",
    "LeaseHeld",
    "LeaseLost",
    "MissingExtra",
    "MomentExpired",
    "NessieAlreadyExists",
    "NessieConflict",
    "NessieError",
    "NessieNotFound",
    "NessieOutcomeUnknown",
    "NessieRefused",
    "NessieUnauthorized",
    "NessieUnavailable",
    "NoSuchState",
    "NotApproved",
    "NotBackedUpHere",
    "NotConfirmed",
    "NotHandedOver",
    "NotNessie",
    "NotOurs",
    "NotPublished",
    "OffsetsGone",
    "OneLakeOnly",
    "OutcomeUnknown",
    "PartitionMismatch",
    "PartitionTaken",
    "PositionLost",
    "PositionUnreadable",
    "PublicationContended",
    "PublicationDamaged",
    "PublicationNotFound",
    "PublicationUnexplained",
    "QueryFailed",
    "ReadOnlyReference",
    "ReadsUnknown",
    "RecordsDeleted",
    "RecordsUnread",
    "ReferenceNotFound",
    "ReplayImpossible",
    "RestoreRefused",
    "RetryNeedsFullRun",
    "RewriteFailed",
    "RootsUnreadable",
    "RowsNotIdentified",
    "RowsRemoved",
    "RowsUnreadable",
    "RunBranchGone",
    "RunUnknown",
    "RunsUnreadable",
    "SchemaMismatch",
    "SecretWithoutTls",
    "ServerDidNotStart",
    "SparkGone",
    "StartOffsetsMissing",
    "StartOffsetsOutOfRange",
    "StateUnreadable",
    "StoredFileDamaged",
    "Superseded",
    "TableFilesDamaged",
    "TableFilesMissing",
    "TableFilesUnreadable",
    "TableMissing",
    "TableNotDropped",
    "TableNotThere",
    "TableTooNarrow",
    "Terminal",
    "TooManyDeadLetters",
    "TopicChanged",
    "TopicReplaced",
    "Transient",
    "TypesUnknown",
    "UndoContended",
    "UndoNotReversible",
    "UndoRefused",
    "UndoUnknown",
    "Unsupported",
    "UnsupportedType",
    "UpsertKeyInvalid",
    "WarehouseShared",
    "WarehouseUnreadable",
    "format_first_values",
    "without_credentials",
]

_USERINFO = re.compile(r"(?<=://)[^/?#\s]*@")
_LONGEST_LINE = 200
"""The largest number of characters of another library's error in a message."""
_SHOWN_VALUES = 5


def without_credentials(message: str) -> str:
    """Replace the `user:password@` part of every URL in `message` by `***@`."""
    return _USERINFO.sub("***@", message)


def format_first_values(values: tuple[str, ...]) -> str:
    """Join the first five values for a message, such as `a, b, c, d, e and 3 more`."""
    more = f" and {len(values) - _SHOWN_VALUES} more" if len(values) > _SHOWN_VALUES else ""
    return ", ".join(values[:_SHOWN_VALUES]) + more


def format_first_line(error: BaseException, *, names_class: bool = True) -> str:
    """Format an error of another library as one line without a final period: its class and first line.

    A long line is cut, and credentials in URLs are replaced by `***`. Without `names_class`, the class is
    named only if the error has no text.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = without_credentials(lines[0].rstrip(".")) if lines else ""
    if names_class or not text:
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]} …"


class Transient:
    """Marker: the cause may be temporary, and the same call may be repeated.

    Nothing was changed, unless the error's class says otherwise.

    Examples:
        .. code-block:: python

            try:
                lake.nessie.reference("main")
            except Transient as error:  # Nessie is unreachable or answers with 503
                raise dg.RetryRequested(max_retries=3, seconds_to_wait=5) from error
    """


class Terminal:
    """Marker: repeating the same call gives the same answer.

    Examples:
        .. code-block:: python

            try:
                lake.catalog("main").create_namespace(("shop",))
            except Terminal as error:  # refused, not found or misconfigured: a person has to act
                raise dg.Failure(str(error), allow_retries=False) from error
    """


class OutcomeUnknown:
    """Marker: a change was requested and its answer is missing, so the change may have happened or not.

    Read the state before you repeat the call.

    Examples:
        .. code-block:: python

            try:
                lake.nessie.delete_tag("release-1", expected_hash=tag_hash)
            except OutcomeUnknown:
                existing_refs = {ref.name for ref in lake.nessie.references()}
                if "release-1" in existing_refs:
                    lake.nessie.delete_tag("release-1", expected_hash=tag_hash)
    """


class BranchlakeError(Exception):
    """The base class of all errors that this package raises on purpose.

    Every raised error also has one of the markers `Transient`, `Terminal` and `OutcomeUnknown`, which show
    what the caller may do next. All arguments are attributes. `str(error)` contains the message, the table,
    the first five partitions, the branch, the run and the hint, but neither `reason` nor `subject`.
    Credentials in URLs are replaced by `***`. Errors can be pickled, because Dagster sends them between
    processes.

    Args:
        message (str): What happened, in a sentence.
        table (Optional[str]): The dotted name of the affected table.
        partitions (Iterable[str]): Printable names of the affected partitions.
        branch (Optional[str]): The name of the Nessie reference.
        run_id (Optional[str]): The id of the Dagster run.
        hint (Optional[str]): What the reader should do, in one sentence.
        reason (Optional[str]): A code for the cause, such as `unknown_setting`, if the class has several
            causes.
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
        """The message without the fields and the hint."""
        return str(self.args[0])

    def __str__(self) -> str:
        fields = (
            ("table", self.table),
            (
                pluralize(len(self.partitions), "partition", "partitions"),
                format_first_values(self.partitions),
            ),
            ("branch", self.branch),
            ("run", self.run_id),
        )
        location = ", ".join(f"{name} {value}" for name, value in fields if value)
        described = f"{self.message} [{location}]" if location else self.message
        return f"{described} {self.hint}" if self.hint else described

    def __reduce__(self) -> tuple[Callable[..., BranchlakeError], tuple[Any, ...], dict[str, Any]]:
        # The default calls cls(*args), which loses the keyword fields and fails if one of them is required.
        return _rebuild_error, (type(self), self.args), self.__dict__


def _rebuild_error(cls: type[BranchlakeError], args: tuple[Any, ...]) -> BranchlakeError:
    error = cls.__new__(cls)
    error.args = args
    return error


def call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Make all calls in order, even if some of them fail.

    If calls fail, raises the first error after the last call. The other errors are added to it as notes.
    """
    errors: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"A later call failed too: {type(other).__name__}: {other}")
        raise errors[0]


class ConfigurationError(BranchlakeError, Terminal):
    """A setting or an argument is missing or wrong. The message names it, and the hint says what to write."""


class SecretWithoutTls(ConfigurationError):
    """A secret was not sent, because the connection over a network has no encryption.

    Args:
        secrets (Iterable[str]): Descriptions of the secrets with their settings, never their values.

    """

    def __init__(self, message: str, *, secrets: Iterable[str] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.secrets = tuple(secrets)


class ReadOnlyReference(BranchlakeError, Terminal):
    """A change was requested on a tag or a fixed hash. Only branches can change."""


class Unsupported(BranchlakeError, Terminal, NotImplementedError):
    """Branchlake does not support the operation. The message has the reason, the hint an alternative."""


_ERRORS_BY_MODULE = {
    "automation.backfill_comparison": ("EarlierStateLost",),
    "backup.errors": (
        "BackupDamaged",
        "BackupFailed",
        "NotBackedUpHere",
        "RestoreRefused",
    ),
    "catalog.stored_files": ("StoredFileDamaged",),
    "checks.constraints": (
        "CheckFailedToRun",
        "ContractError",
    ),
    "cleanup.jobs": (
        "NotOurs",
        "RunsUnreadable",
    ),
    "cleanup.sweep_plan": (
        "BaseUnknown",
        "StateUnreadable",
    ),
    "cleanup.sweeper": ("FilesNotDeleted",),
    "embedded.jars": (
        "DownloadFailed",
        "JarRefused",
    ),
    "embedded.process": ("ServerDidNotStart",),
    "embedded.state_folder": (
        "LakeMoved",
        "LakeNotRunning",
    ),
    "expiry.forward_commit": (
        "ExpiryContended",
        "ExpiryUnknown",
    ),
    "expiry.roots": ("ConsumersUnreadable",),
    "expiry.snapshot_expiry": ("ExpiryInvalid",),
    "extras": ("MissingExtra",),
    "garbage_collection.journal": (
        "JournalContended",
        "JournalLost",
    ),
    "garbage_collection.reachable_files": ("RootsUnreadable",),
    "garbage_collection.shared_warehouse": ("WarehouseShared",),
    "garbage_collection.warehouse_files": ("WarehouseUnreadable",),
    "history.change": (
        "ChangeLost",
        "RowsUnreadable",
    ),
    "ingest.batch_tables": ("TypesUnknown",),
    "ingest.errors": (
        "AnotherIngestion",
        "ColumnsUnknown",
        "ConsumerGroupActive",
        "EarlierAttemptLate",
        "IngestError",
        "KafkaRefused",
        "KafkaUnavailable",
        "LandingUnavailable",
        "DeadLettersLeftOut",
        "PositionLost",
        "RecordsDeleted",
        "RecordsUnread",
        "RowsNotIdentified",
        "StartOffsetsMissing",
        "StartOffsetsOutOfRange",
        "Superseded",
        "TableTooNarrow",
        "TooManyDeadLetters",
        "TopicChanged",
        "TopicReplaced",
    ),
    "nessie.errors": (
        "ContentNotFound",
        "NessieAlreadyExists",
        "NessieConflict",
        "NessieError",
        "NessieNotFound",
        "NessieOutcomeUnknown",
        "NessieRefused",
        "NessieUnauthorized",
        "NessieUnavailable",
        "NotNessie",
        "ReferenceNotFound",
    ),
    "publication.column_changes": ("ColumnChangeRefused",),
    "publication.ledger": ("BaseNotOnMain",),
    "publication.publisher": (
        "PublicationContended",
        "PublicationUnexplained",
    ),
    "publication.replay": (
        "ReplayImpossible",
        "TableFilesDamaged",
        "TableFilesMissing",
        "TableFilesUnreadable",
    ),
    "publication.run_publication": (
        "NotPublished",
        "RunUnknown",
    ),
    "publication.unpublished_runs": ("AlertFailed",),
    "query.reference": (
        "MomentExpired",
        "NoSuchState",
        "QueryFailed",
        "TableNotThere",
    ),
    "receivers.kafka_sink": (
        "BrokerRefused",
        "BrokerUnreachable",
    ),
    "receivers.landing": (
        "LandingDamaged",
        "OffsetsGone",
    ),
    "receivers.records": (
        "NotConfirmed",
        "NotHandedOver",
        "PartitionTaken",
    ),
    "runs.heartbeats": ("HeartbeatsUnreadable",),
    "spark.session": ("SparkGone",),
    "tables.errors": (
        "ColumnUnsupported",
        "ColumnsFrozen",
        "ForeignSession",
        "InputColumnGone",
        "InvalidCheckRun",
        "LeaseHeld",
        "LeaseLost",
        "NotApproved",
        "OneLakeOnly",
        "PartitionMismatch",
        "PositionUnreadable",
        "ReadsUnknown",
        "RetryNeedsFullRun",
        "RowsRemoved",
        "RunBranchGone",
        "SchemaMismatch",
        "TableMissing",
        "UnsupportedType",
        "UpsertKeyInvalid",
    ),
    "tables.table_files": ("FileUnreadable",),
    "undo.find_publication": (
        "PublicationDamaged",
        "PublicationNotFound",
        "UndoNotReversible",
    ),
    "undo.publication_undo": (
        "UndoContended",
        "UndoUnknown",
    ),
    "compaction.errors": (
        "CompactionContended",
        "CompactionNotClean",
        "CompactionRowsDiffer",
        "CompactionUnknown",
        "RewriteFailed",
    ),
    "undo.result": ("UndoRefused",),
    "undo.undrop": (
        "DroppedTableUnreadable",
        "TableNotDropped",
    ),
}
"""Modules of the package -> the errors that they define. The first use of an error imports its module."""
_MODULE_BY_ERROR = {name: module for module, names in _ERRORS_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_ERROR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module(f"branchlake_dagster.{_MODULE_BY_ERROR[name]}"), name)
