"""The errors of ingestion, in addition to those of tables and branches."""

from __future__ import annotations

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal, Transient


class IngestError(BranchlakeError):
    """Root of the errors of ingestion. The message names the ingestion, and the topic if one is concerned."""


class KafkaUnavailable(IngestError, Transient):  # noqa: N818 - named like the other outcomes
    """The Kafka brokers or the schema registry did not answer in time. A later attempt may succeed."""


class KafkaRefused(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """The brokers refused a request: wrong credentials, missing permissions, or a missing topic."""


class LandingUnavailable(IngestError, Transient):  # noqa: N818 - named like the other outcomes
    """A topic of the landing folder cannot be read now.

    Its reason is `unknown_topic` if no receiver has written the topic yet or the folder is missing, and
    `unreadable` for another error of the operating system.
    """


class TopicChanged(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """A topic has changed since it was read: it was recreated, or records at its end or start are gone.

    To continue would lose records or read some twice, so the user must decide.
    """


class PositionLost(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """The progress in the tables is lost: a table was rolled back, replaced or damaged."""


class StartOffsetsMissing(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """Partitions have no offset to start at. `partitions` names them, as `orders[2]`. Nothing was read."""


class StartOffsetsOutOfRange(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """A topic does not have the offsets to start at: they are before its first or after its last offset.

    `partitions` names the partitions, as `orders[0]`. Nothing was read.
    """


class ConsumerGroupActive(IngestError, Transient):  # noqa: N818 - named like the other outcomes
    """The consumer group to start from still has members or an open transaction.

    Its committed offsets are about to change. Nothing was read.
    """


class AnotherIngestion(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """Another ingestion fills the table from the same topic, so its rows would be duplicated."""


class RecordsDeleted(IngestError, Transient):  # noqa: N818 - named like the other outcomes
    """Kafka deleted records, by retention or on request, while a batch read them.

    Nothing of the batch is kept. The next batch finds the topic's new start, and raises TopicChanged if the
    tables have not read all records before it.
    """


class TopicReplaced(IngestError, Transient):  # noqa: N818 - named like the other outcomes
    """A topic was deleted and created again while a batch read it. Nothing of the batch is kept.

    The next batch finds the new topic and follows the ingestion's rules for recreated topics.
    """


class EarlierAttemptLate(IngestError, Transient):  # noqa: N818 - named like the other outcomes
    """An earlier attempt of the step committed its records after this attempt had begun.

    If this attempt committed too, the records would be in the tables twice. So it commits nothing. The next
    attempt undoes the late commit and starts again.
    """


class ColumnsUnknown(IngestError, ConfigurationError):  # noqa: N818 - named like the other outcomes
    """A table without declared columns must be created, but no record of the batch has a field for it."""


class TableTooNarrow(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """Records do not fit a table even after it was evolved for them. Nothing of the batch is kept."""


class DeadLettersLeftOut(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """Reprocessed dead letters produced neither a row nor a dead letter. Nothing was changed."""


class RecordsUnread(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """A reprocessing read fewer dead letters or kept records than it had selected. Nothing is published."""


class RowsNotIdentified(IngestError, ConfigurationError):  # noqa: N818 - named like the other outcomes
    """The rows of a table cannot be traced to their records, so kept records cannot replace them.

    Nothing was changed.
    """


class TooManyDeadLetters(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """The share of dead letters among a batch's records is above the ingestion's `tolerance`."""


class Superseded(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """The publication of a live batch was refused, or another process has deleted the branch of the batch.

    Usually another run of the ingestion has published the same offsets.
    """
