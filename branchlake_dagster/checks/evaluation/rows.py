"""The rows under judgement, and how much of them has to be opened for an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from branchlake_dagster.branching.io.stored_rows import RowPartitions
    from branchlake_dagster.checks.constraints.model import Constraint, Outcome


class Rows(Protocol):
    """What a contract is held against. `frame` may start Spark; nothing else does where it can be avoided."""

    @property
    def schema(self) -> StructType:
        """Columns and types as Spark has them."""

    @property
    def frame(self) -> DataFrame:
        """The rows in Spark, read lazily."""

    @property
    def partitions(self) -> RowPartitions | None:
        """How the rows belong to several partitions of their asset; None if that is not known."""

    def proved(self, constraint: Constraint) -> Outcome | None:
        """The outcome of a constraint that holds and that no row need be read for; None: read the rows."""


class FrameRows:
    """Rows that are known as a Spark frame and as nothing else."""

    def __init__(self, frame: DataFrame) -> None:
        self._frame = frame

    @property
    def schema(self) -> StructType:
        """Asked of the server, which analyses the frame."""
        return self._frame.schema

    @property
    def frame(self) -> DataFrame:
        """The frame."""
        return self._frame

    @property
    def partitions(self) -> RowPartitions | None:
        """A frame does not say of which partitions it is."""
        return None

    def proved(self, constraint: Constraint) -> Outcome | None:  # noqa: ARG002 - the protocol's
        """Nothing is known without reading."""
        return None
