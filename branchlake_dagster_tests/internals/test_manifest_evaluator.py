"""PyIceberg asks one manifest evaluator from several threads; the answers must not mix manifests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyiceberg.expressions import EqualTo, Or
from pyiceberg.manifest import ManifestFile, PartitionFieldSummary
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.update import snapshot as snapshot_producers
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import NestedField, StringType

from branchlake_dagster.internals import pyiceberg as pyiceberg_internals

SCHEMA = Schema(NestedField(1, "day", StringType(), required=False))
SPEC = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "day"))


class WatchedSummaries(list[PartitionFieldSummary]):
    """The partition summaries of a manifest, which call `when_read` at their first read."""

    when_read: Callable[[], object] | None = None

    def __getitem__(self, index: Any) -> Any:
        when_read, self.when_read = self.when_read, None
        if when_read is not None:
            when_read()
        return super().__getitem__(index)


def manifest_of(day: str) -> ManifestFile:
    """A manifest whose files are all of one partition."""
    bound = day.encode()
    summary = PartitionFieldSummary.from_args(
        contains_null=False, contains_nan=False, lower_bound=bound, upper_bound=bound
    )
    return ManifestFile.from_args(
        manifest_path=f"{day}.avro", partition_spec_id=0, partitions=WatchedSummaries([summary])
    )


def test_an_evaluator_that_is_asked_about_another_manifest_meanwhile() -> None:
    build_evaluator: Any = vars(snapshot_producers)["manifest_evaluator"]  # not exported
    assert build_evaluator is pyiceberg_internals._build_manifest_evaluator
    either_day = Or(EqualTo("day", "a"), EqualTo("day", "b"))
    evaluate = build_evaluator(SPEC, SCHEMA, either_day)
    wanted, other = manifest_of("b"), manifest_of("c")
    answers_for_other: list[bool] = []
    assert isinstance(wanted.partitions, WatchedSummaries)
    wanted.partitions.when_read = lambda: answers_for_other.append(evaluate(other))
    assert evaluate(wanted)
    assert answers_for_other == [False]
