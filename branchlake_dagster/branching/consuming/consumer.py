"""An asset that consumes changes, and an input of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dagster import AssetKey, PartitionsDefinition, TimeWindowPartitionsDefinition
from pyiceberg.table import Table

from branchlake_dagster.branching.consuming.affected import dimensions
from branchlake_dagster.branching.consuming.declaration import Declaration, Pattern
from branchlake_dagster.branching.table.spec import TableSpec
from branchlake_dagster.changes.model import Position

Identifier = tuple[str, ...]


@dataclass(frozen=True)
class Consumer:
    """An asset that consumes changes: its table, its partitions, and where its inputs are stored."""

    asset: str
    spec: TableSpec
    declaration: Declaration
    inputs: Mapping[AssetKey, Identifier]
    definition: PartitionsDefinition[str] | None = None

    @property
    def by_partition(self) -> bool:
        """Whether each of its partitions has a position of its own."""
        return self.definition is not None and bool(self.spec.columns_by_dimension)

    def column_of_input(self, dimension: str) -> str:
        """The column of the inputs that decides on a partition of the asset."""
        own = self.spec.columns_by_dimension[dimension]
        part = dimensions(self.definition).get(dimension) if self.definition is not None else None
        in_time = isinstance(part, TimeWindowPartitionsDefinition)
        return self.declaration.on or own if in_time else own

    def columns_of_inputs(self, table: Table) -> dict[str, str]:
        """By dimension the column of an input that decides on a partition, as far as the input has it."""
        known = {field.name for field in table.schema().fields}
        columns = {name: self.column_of_input(name) for name in self.spec.columns_by_dimension}
        return {name: column for name, column in columns.items() if column in known}


@dataclass(frozen=True)
class Input:
    """An input as the run's branch has it, and as `main` had it where the branch began."""

    key: AssetKey
    name: str
    pattern: Pattern
    table: Table
    upto: Position
