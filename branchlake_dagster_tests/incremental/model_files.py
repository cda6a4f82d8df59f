"""What the model puts in the place of files and of a Dagster instance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from pyiceberg.manifest import DataFileContent

from branchlake_dagster.history import manifests, rows
from branchlake_dagster.history import manifests as own_files
from branchlake_dagster.history.manifests import LiveFile, OwnFiles, OwnFilesCache
from branchlake_dagster.history.rows import RowReader
from branchlake_dagster_tests.dagster_internals import DynamicPartitionsStore
from branchlake_dagster_tests.incremental.iceberg import (
    Entry,
    File,
    Manifest,
    Snapshot,
    arrow,
    arrow_schema,
    left,
)


class Partitions(DynamicPartitionsStore):
    """A Dagster instance, as far as dynamic partitions ask for it."""

    def __init__(self, parts: list[str]) -> None:
        self._parts = parts

    def get_dynamic_partitions(self, partitions_def_name: str) -> list[str]:
        return list(self._parts)

    def has_dynamic_partition(self, partitions_def_name: str, partition_key: str) -> bool:
        return partition_key in self._parts

    def get_paginated_dynamic_partitions(self, *_: object, **__: object) -> Any:
        raise NotImplementedError

    def get_dynamic_partitions_definition_id(self, partitions_def_name: str) -> str:
        return f"{partitions_def_name}: {self._parts}"


def _own(snapshots: Any, head: object, io: object) -> list[tuple[Any, OwnFiles]]:
    return [(one, OwnFiles(one.added, one.removed)) for one in snapshots]


def _live(self: object, snapshot: Snapshot, io: object) -> list[LiveFile]:
    return [
        LiveFile(one.data_file, one.snapshot_id, one.data_file.content is DataFileContent.DATA)
        for one in snapshot.after
    ]


def _manifests(io: object, snapshot: Snapshot | None) -> Iterator[Manifest]:
    return snapshot.manifests() if snapshot is not None else iter(())


def _entries(io: object, manifest: Manifest) -> Iterator[Entry]:
    return iter(manifest.entries)


def _scan(self: RowReader, tasks: Any) -> pa.Table:
    found = [row for task in tasks for row in left(task.file, task.delete_files)]
    return arrow(found, self._schema)


def _deleted_positions(io: object, file: File) -> dict[str, pa.ChunkedArray]:
    return {path: pa.chunked_array([pa.array(where, pa.int64())]) for path, where in file.names.items()}


@contextmanager
def model_files() -> Any:
    """Let change capture read the model's tables."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(own_files, "_read_snapshots", _own))
        stack.enter_context(patch.object(OwnFilesCache, "load_live_files", _live))
        stack.enter_context(patch.object(manifests, "read_manifests", _manifests))
        stack.enter_context(patch.object(manifests, "read_manifest_entries", _entries))
        stack.enter_context(patch.object(RowReader, "_scan", _scan))
        stack.enter_context(patch.object(rows, "arrow_schema", arrow_schema))
        stack.enter_context(patch.object(rows, "read_deleted_positions", _deleted_positions))
        yield
