"""What can go wrong in ingestion beyond tables and branches."""

from __future__ import annotations

from branchlake_dagster.errors import BranchlakeError, ConfigurationError, Terminal, Transient


class IngestError(BranchlakeError):
    """Root of the errors of ingestion; the text names the ingestion, and the topic where one is meant."""


class KafkaUnavailable(IngestError, Transient):  # noqa: N818 - named like the other outcomes
    """The brokers did not answer; nothing was read or written."""


class KafkaRefused(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """The brokers answered and said no: credentials, permissions, or a topic that is not there."""


class LandingUnavailable(IngestError, Transient):  # noqa: N818 - named like the other outcomes
    """A landing folder does not have a topic: nobody has received it yet, or the folder is not there."""


class TopicChanged(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """A topic is not what the tables were filled from: made again, cut at its end, or cut at its start.

    Going on by itself would lose records or read some twice, so somebody decides.
    """


class PositionLost(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """The tables do not tell any more how far they have come: rolled back, replaced, or damaged."""


class StartOffsetsMissing(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """Partitions have no offset to start at. `partitions` names them: `orders[2]`. Nothing was read."""


class StartOffsetsOutOfRange(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """A topic does not have the offsets to start at: they are before its first or after its last one.

    `partitions` names the partitions: `orders[0]`. Nothing was read.
    """


class ConsumerGroupActive(IngestError, Transient):  # noqa: N818 - named like the other outcomes
    """The consumer group to start from still has members or an open transaction.

    Its committed offsets are about to change. Nothing was read.
    """


class AnotherIngestion(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """A table is filled from the same topic by another ingestion: its rows would be there twice."""


class RecordsDeleted(IngestError, Transient):  # noqa: N818 - named like the other outcomes
    """Kafka deleted records, by retention or on request, while a batch read them.

    Nothing of the batch is kept. The next batch finds the topic's new start, and raises TopicChanged if the
    tables have not read all records before it.
    """


class TopicReplaced(IngestError, Transient):  # noqa: N818 - named like the other outcomes
    """A topic was deleted and made again while a batch read it. Nothing of the batch is kept.

    The next look sees the new one, and the ingestion's rules say what becomes of it.
    """


class EarlierAttemptLate(IngestError, Transient):  # noqa: N818 - named like the other outcomes
    """What an earlier attempt of the step had sent has arrived meanwhile: its records would be there twice.

    The next attempt takes it back and begins anew.
    """


class ColumnsUnknown(IngestError, ConfigurationError):  # noqa: N818 - named like the other outcomes
    """A table has to be made, its columns are not declared, and no record of the batch has a field for it."""


class TableTooNarrow(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """Records fit a table not even after it was evolved for them; nothing of the batch is kept."""


class LettersLeftOut(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """Dead letters that were to be put back gave neither a row nor a dead letter; nothing was changed."""


class TooManyDeadLetters(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """More of a batch's records cannot be converted than the ingestion tolerates."""


class Superseded(IngestError, Terminal):  # noqa: N818 - named like the other outcomes
    """Another run of this ingestion has published the same offsets, or has taken over: this one is fenced."""
