"""The Spark expressions that prepare the records of a batch, before the workers write them to tables."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import add, and_

from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.checks.compiler import compile_schema
from branchlake_dagster.checks.constraints import RowConstraint, SchemaConstraint
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.batch_tables import Target
from branchlake_dagster.ingest.declaration import (
    MAX_ROUTE_NAME_LENGTH,
    ROUTE_NAME_PATTERN,
    TOMBSTONE,
    ExpandedIngest,
    FamilyTable,
    Ingest,
    IngestTable,
)
from branchlake_dagster.ingest.formats import REASON_SUFFIX, Format, Json
from branchlake_dagster.ingest.offsets import Offsets
from branchlake_dagster.ingest.spark_expressions import (
    RecordColumn,
    any_of,
    bind_value,
    build_case,
    build_reason,
    first_reason,
    full_match_pattern,
    join_balanced,
    matches_whole,
    no_reason,
    with_columns,
)
from branchlake_dagster.ingest.worker_writer import MOVED_SUFFIX, TABLES_PER_SET
from branchlake_dagster.ingest.writable_columns import (
    column_bounds,
    required_part_columns,
    text_bounds,
    unwritable_conditions,
)
from branchlake_dagster.spark.session import quote_spark_name


def field_text(ingest: Ingest, record_format: Format, name: str) -> Expression:
    """Return the expression of a field of the record as text.

    With an envelope, a field that is null is read from `payload` instead, which Kafka Connect writes if it
    adds the schema to each record.
    """
    text = record_format.field_text(name)
    return text if ingest.envelope is None else F.coalesce(text, record_format.field_text(f"payload.{name}"))


def record_route(ingest: Ingest, record_format: Format) -> Expression:
    """Return the expression of a record's route: its topic, or the text of a field, by `route_by`.

    It is null if the record does not have the field.
    """
    return (
        F.col("__topic") if ingest.route_by == "topic" else field_text(ingest, record_format, ingest.route_by)
    )


def takes_route(declaration: IngestTable, route: Expression) -> Expression:
    """Return an expression that is true if the table takes records of the route (the expression `route`).

    It is null for a null route, and for a family also if the route names no valid table. It is true for every
    route, also null, if the declaration of a single table has no route.
    """
    if isinstance(declaration, FamilyTable):
        return family_route_name(declaration, route) == declaration.name
    return F.lit(True) if declaration.route is None else _matches_route(route, declaration.route)


def family_route_name(family: IngestTable, route: Expression) -> Expression:
    """Return the part of the route that names a table of this family.

    The expression is null if the route does not match the family, or gives no valid name.
    """
    pattern = family.route
    if pattern is None:
        name = route
    elif re.compile(pattern).groups:
        # The result is empty if the pattern does not match or the group did not take part.
        name = F.regexp_extract(route, full_match_pattern(pattern), 1)
    else:
        name = F.when(_matches_route(route, pattern), route)
    return F.when(matches_whole(name, ROUTE_NAME_PATTERN) & (F.length(name) <= MAX_ROUTE_NAME_LENGTH), name)


def _matches_route(route: Expression, pattern: str) -> Expression:
    """Return whether the pattern matches the whole route.

    A pattern without special characters is compared as text, which is faster.
    """
    is_plain = re.escape(pattern) == pattern
    return route == pattern if is_plain else matches_whole(route, pattern)


FOR_TABLE = "__for"
"""Column of reprocessed dead letters: the table that could not take the record; null for any table."""
INCARNATION = "__incarnation"
"""Column of stored records, which are dead letters or kept records: the incarnation of their topic."""
WAITING_TABLES = "__waits"
"""Column while a table is filled again: an array of the tables for which a dead letter of the record waits.

The text "" in the array stands for any table."""
_RECORD_PARTS = ("offset", "key", "value")
_UNREADABLE_KINDS = ("empty", "encoding", "syntax", "format", "schema")
"""Kinds of errors that concern the whole value."""


def mapped_fields(target: Target) -> set[str]:
    """Return the names of a record's fields that need no new column in the table.

    These are the fields from which columns are filled, and the names of columns that attributes fill.
    """
    attributes = target.declaration.attributes if target.declaration else {}
    return {name for column in target.columns for name in column.fields} | {*attributes}


def row_columns(targets: Sequence[Target]) -> list[str]:
    """Return the name of the column with a target's rows, such as `__row0`, for each target in order.

    Targets with equal columns, keys, attributes and contract share one column.
    """
    names: dict[object, str] = {}
    return [names.setdefault(_row_shape(target), f"__row{len(names)}") for target in targets]


def _row_shape(target: Target) -> object:
    declaration = target.declaration
    assert declaration is not None  # noqa: S101 - dead letters have no rows of this kind
    attributes = tuple(sorted(declaration.attributes.items()))
    needed = (
        tuple(declaration.keys),
        tuple(declaration.required),
        frozenset(_identifier_columns(target)),
        attributes,
    )
    return target.columns, declaration.contract, *needed, declaration.mode == "changes", column_bounds(target)


def _identifier_columns(target: Target) -> set[str]:
    """Return the target's columns whose required flag Iceberg does not allow to relax: identifier fields."""
    return set(target.table.schema().identifier_field_names())


class PreparedRecords:
    """Converts the records of one pass with Spark expressions, so that workers only have to write them.

    `targets` are the tables without dead letters and kept records. `min_offsets` has the offsets below which
    each table takes no records.
    """

    def __init__(
        self,
        ingest: ExpandedIngest,
        record_format: Format,
        targets: Sequence[Target],
        min_offsets: Mapping[str, Offsets],
        dead_letter_offsets: Offsets | None,
        stored_topics: Sequence[tuple[str, str]],
        *,
        are_dead_letters: bool = False,
        keeps_records: bool = False,
        kept_offsets: Offsets | None = None,
    ) -> None:
        self._ingest = ingest
        self._record_format = record_format
        self._targets = targets
        self._min_offsets = min_offsets
        self._dead_letter_offsets = dead_letter_offsets
        """Records before these offsets are already dead letters if they were bad. None if no table is filled
        again."""
        self._stored_topics = stored_topics
        """Topics and incarnations of stored records that are decoded again. Empty if the records come from
        topics."""
        self._are_dead_letters = are_dead_letters
        self._keeps_records = keeps_records
        """Whether the workers need all parts of every record, because they keep them."""
        self._kept_offsets = kept_offsets
        """Records before these offsets are already kept. None if no table is filled again."""
        self._rows = row_columns(targets)

    def select_columns(self, frame: DataFrame) -> DataFrame:
        """Return the frame for the workers: the needed parts of the records, their rows and their tables.

        The parts that only bad records need are one struct, which is null for good records. The transfer by
        Arrow has a cost for each column, whatever it contains, and an array costs more than all other columns
        together.
        """
        frame = frame.withColumn("__op", self._operation())
        if self._needs_attribute("digest"):
            frame = frame.withColumn("__digest", F.sha2("__value", 256))
        shapes = dict(zip(self._rows, self._targets, strict=True))
        for row, target in shapes.items():
            frame = self._with_rows(frame, row, target)
        frame = frame.withColumn("__route", self._route())
        is_refill = self._dead_letter_offsets is not None
        frame = with_columns(
            frame, {f"__meant{n}": self._is_meant_for(target) for n, target in enumerate(self._targets)}
        )
        has_waiting = WAITING_TABLES in frame.columns
        write_flags = {
            f"__mine{n}": F.col(f"__meant{n}")
            & ~_is_before(self._min_offsets.get(target.name, {}))
            & self._may_write_row(target, has_waiting)
            for n, target in enumerate(self._targets)
        }
        frame = with_columns(frame, write_flags)
        if is_refill:
            is_new = ~self._was_read_before()
            dead_letter_flags = {
                f"__bad{n}": F.col(f"__meant{n}") & is_new for n in range(len(self._targets))
            }
            frame = with_columns(frame, dead_letter_flags)
        frame = with_columns(frame, {f"__new{n}": name for n, name in enumerate(self._new_route_names())})
        has_table = any_of(F.col(f"__meant{number}") for number in range(len(self._targets)))
        is_lost = ~has_table & ~self._was_read_before() & ~self._is_redundant_tombstone()
        if self._ingest.on_unrouted == "skip":
            is_lost = is_lost & self._must_not_skip(next(iter(shapes), None))
        frame = frame.withColumn("__lost", is_lost)
        is_bad = any_of(F.col(f"{row}{REASON_SUFFIX}").isNotNull() for row in shapes) | F.col("__lost")
        bad_record = F.struct(
            *(F.col(f"__{name}").alias(name) for name in _RECORD_PARTS),
            F.to_json("__headers").alias("headers"),
            *([F.col(FOR_TABLE).alias("table")] if self._are_dead_letters else []),
            F.when(F.col("__lost"), self._lost_reason(next(iter(shapes), None))).alias("lost"),
        )
        unknown_fields = self._unknown_fields()
        kept = None if not self._keeps_records or not is_refill else ~_is_before(self._kept_offsets or {})
        return frame.select(
            self._topic_number().alias("__topic"),
            "__partition",
            "__timestamp",
            *(f"__{name}" for name in (*_RECORD_PARTS, "op", "digest") if self._is_sent(name)),
            *(["__headers"] if self._keeps_records else []),
            *([] if kept is None else [kept.alias("__kept")]),
            F.when(is_bad, bad_record).alias("__rest"),
            *([] if unknown_fields is None else [unknown_fields.alias("__unknown")]),
            *(f"__new{number}" for number in range(len(self._ingest.families))),
            *self._table_bits("mine"),
            *(self._table_bits("bad") if is_refill else []),
            *(name for row in shapes for name in (row, f"{row}{REASON_SUFFIX}")),
            *(f"{row}{MOVED_SUFFIX}" for row, target in shapes.items() if self._can_move_rows(target)),
            *(f"{row}_evolve" for row in shapes if self._changes_types),
        )

    def _table_bits(self, what: str) -> list[Expression]:
        """Return integer columns, each with one bit per table for up to `TABLES_PER_SET` tables.

        The bit of table n is set where the boolean column `__<what>n` is true. A batch has few different
        integers, so these columns are compact.
        """
        columns = []
        for group in range(0, len(self._targets), TABLES_PER_SET):
            numbers = range(group, min(group + TABLES_PER_SET, len(self._targets)))
            bits = [
                F.when(F.col(f"__{what}{number}"), 1 << number - group).otherwise(0) for number in numbers
            ]
            columns.append(
                join_balanced(add, bits, F.lit(0)).cast("bigint").alias(f"__{what}_{group // TABLES_PER_SET}")
            )
        return columns

    def _must_not_skip(self, row: str | None) -> Expression:
        """Return whether an unrouted record must become a dead letter although `on_unrouted` is "skip".

        A record that cannot be read has no route, so its table is unknown. A dead letter that is reprocessed
        stays a dead letter: if it were skipped, it would be marked as reprocessed and be lost. `row` is the
        column with the rows of any table, whose reason shows an unreadable record; None without tables.
        """
        if self._are_dead_letters:
            return F.lit(True)
        if row is None:
            return F.lit(False)
        return F.coalesce(
            F.col(f"{row}{REASON_SUFFIX}").getField("kind").isin(*_UNREADABLE_KINDS), F.lit(False)
        )

    def _lost_reason(self, row: str | None) -> Expression:
        """Return why no table takes a record: it has no route that matches, or it cannot be read at all.

        `row` is the column with the rows of any table; None without tables.
        """
        named = F.coalesce("__route", F.lit("(none)"))
        reasons = [build_reason("route", F.concat(F.lit("No table takes the route "), named))]
        if row is not None:
            reason = F.col(f"{row}{REASON_SUFFIX}")
            reasons = [F.when(reason.getField("kind").isin(*_UNREADABLE_KINDS), reason), *reasons]
        return F.coalesce(*reasons)

    def _new_route_names(self) -> Iterator[Expression]:
        """Yield for each family the route name of a record whose table does not exist yet, else null."""
        for family, declaration in self._ingest.families.items():
            name = family_route_name(declaration, F.col("__route"))
            known_names = [table.name for table in self._ingest.family_tables if table.family == family]
            new = ~name.isin(known_names) & ~self._was_read_before()
            if self._are_dead_letters:
                new = new & F.col(FOR_TABLE).isNull()
            yield F.when(new, name)

    def _topic_number(self) -> Expression:
        """Return the index of the record's topic in `Work.topics`; -1 if it is not there.

        Stored records are compared by topic and incarnation, others by topic only.
        """
        if self._stored_topics:
            conditions = [
                (F.col("__topic") == topic) & F.col(INCARNATION).eqNullSafe(incarnation)
                for topic, incarnation in self._stored_topics
            ]
            return build_case(
                [(condition, F.lit(number)) for number, condition in enumerate(conditions)], F.lit(-1)
            )
        names = list(self._ingest.topics)
        if len(names) == 1:
            return F.lit(0)
        return build_case(
            [(F.col("__topic") == name, F.lit(number)) for number, name in enumerate(names)], F.lit(-1)
        )

    def _is_sent(self, attribute: str) -> bool:
        """Return whether a part of the record is sent to the workers for every record, not only for bad ones.

        `attribute` is `offset`, `key`, `value`, `op` or `digest`. It is sent if a table needs it, or if the
        ingestion keeps its records.
        """
        return self._needs_attribute(attribute) or (self._keeps_records and attribute in _RECORD_PARTS)

    def _needs_attribute(self, attribute: str) -> bool:
        """Return whether some table needs this attribute of every record.

        Merges need operation and offset.
        """
        declarations = [declaration.declaration for declaration in self._targets if declaration.declaration]
        merged = attribute in ("offset", "op") and any(
            declaration.mode != "append" for declaration in declarations
        )
        return merged or any(attribute in declaration.attributes.values() for declaration in declarations)

    # -- the operation and the fields of a record --------------------------------------------------------

    def _operation(self) -> Expression:
        """Return the expression of the record's operation: insert, update, delete or tombstone.

        It is tombstone for a record without a value, and null if the operation is missing or unknown.
        """
        operation_text = F.lower(self._operation_text())
        meanings = self._ingest.operations.items()
        tombstone = F.when(F.col("__value").isNull(), F.lit(TOMBSTONE))
        return F.coalesce(
            tombstone, *(F.when(operation_text == word, F.lit(meaning)) for word, meaning in meanings)
        )

    def _operation_text(self) -> Expression:
        ingest = self._ingest
        name = "op" if ingest.envelope == "debezium" and not ingest.operation else ingest.operation
        return F.lit(None).cast("string") if name is None else self._field_text(name)

    def _field_text(self, name: str) -> Expression:
        return field_text(self._ingest, self._record_format, name)

    def _route(self) -> Expression:
        name = self._ingest.route_by
        columns = self._targets[0].columns if self._targets else ()
        read = next((column for column in columns if column.fields == (name,)), None)
        topic = name == "topic" or self._ingest.envelope is not None
        if topic or read is None or read.kind != "string":
            return record_route(self._ingest, self._record_format)
        # The route was already read as a column. Reading it from JSON again took a fifth of the time of a
        # batch with ten tables.
        row = self._rows[0]
        here = F.col(row).getField(read.name)
        return F.when(F.col(f"{row}{REASON_SUFFIX}").isNull(), here).otherwise(self._field_text(name))

    def _unknown_fields(self) -> Expression | None:
        """Return the expression of the fields for which some table has no column, as a JSON list.

        Fields whose value is null are left out of the list. The expression is null if all fields have
        columns. Returns None if no columns are to be added, if the format cannot list fields, or without
        tables.
        """
        adds_columns = "add" in self._ingest.evolve
        deleted = F.coalesce(F.col("__op") == "delete", F.lit(False))
        is_deletion = None if self._ingest.envelope is None else deleted
        names, names_with_value = (
            self._record_format.record_field_names(with_values=with_values, is_deletion=is_deletion)
            if adds_columns
            else None
            for with_values in (False, True)
        )
        if names is None or names_with_value is None:
            return None
        if not self._targets:
            return None
        mapped_names = set.intersection(*(mapped_fields(target) for target in self._targets))
        others = {name for name in (self._ingest.route_by, self._ingest.operation) if name} - {"topic"}
        rest = F.array_except(names, F.array(*(F.lit(name) for name in sorted(mapped_names | others))))
        return F.when(F.size(rest) > 0, F.to_json(F.array_intersect(rest, names_with_value)))

    @property
    def _changes_types(self) -> bool:
        return bool({"widen", "relax"} & {*self._ingest.evolve})

    # -- rows ------------------------------------------------------------------------------------------

    def _with_rows(self, frame: DataFrame, row: str, target: Target) -> DataFrame:
        """Add the column `row` (`__row0`) with the target's rows, and `__row0_why` with reasons.

        The reason is null if the record is a good row of the target. Otherwise its `kind` and `detail` say
        why it is not.
        """
        declaration = target.declaration
        assert declaration is not None  # noqa: S101 - dead letters have no rows of this kind
        deleted = F.coalesce(F.col("__op").isin("delete", TOMBSTONE), F.lit(False))
        widening = "widen" in self._ingest.evolve
        columns = [column.wider for column in target.columns] if widening else list(target.columns)
        is_deletion = None if self._ingest.envelope is None else deleted
        frame = self._convert_rows(frame, row, target, columns, is_deletion)
        if self._can_move_rows(target):
            frame = self._with_moved_keys(frame, row, target)
        reason = F.col(f"{row}{REASON_SUFFIX}")
        tombstone = F.coalesce(F.col("__op") == TOMBSTONE, F.lit(False))
        # A deleted row needs only its keys.
        needs_all_columns = ~deleted if declaration.mode == "changes" else ~tombstone
        if names := required_part_columns(target):
            frame = _without_values(frame, row, target, names, where=~needs_all_columns)

        def value_of(column: str) -> Expression:
            attribute = declaration.attributes.get(column)
            return F.col(row).getField(column) if attribute is None else F.col(f"__{attribute}")

        fixed, relaxed = _identifier_columns(target), "relax" in self._ingest.evolve
        required_columns = [
            column.name
            for column in target.columns
            if column.required and (not relaxed or column.name in fixed)
        ]
        null_conditions = [
            (value_of(column).isNull(), f"{column} is null.") for column in dict.fromkeys(declaration.keys)
        ] + [
            (needs_all_columns & value_of(column).isNull(), f"{column} is null.")
            for column in dict.fromkeys([*declaration.required, *required_columns])
        ]
        empty = F.col("__value").isNull(), build_reason("empty", "The record has no value.")
        has_no_operation = F.col("__op").isNull()
        unknown_operation = (
            has_no_operation & self._operation_text().isNotNull(),
            build_reason("operation", "The record's operation is not known."),
        )
        missing_operation = has_no_operation, build_reason("operation", "The record has no operation.")
        changes, by_record = declaration.mode == "changes", declaration.keyed_by_record
        of_value = [empty, *([unknown_operation] if changes else []), (reason.isNotNull(), reason)]
        reasons = [(~tombstone & reason, text) for reason, text in of_value] if by_record else of_value
        bounds = (
            column_bounds(target)
            if isinstance(self._record_format, Json)
            else (*column_bounds(target), *text_bounds(target))
        )
        reasons += [
            *first_reason("conversion", unwritable_conditions(bounds, row)),
            *first_reason("required", null_conditions),
        ]
        reason = build_case([*reasons, *([missing_operation] if changes else [])], no_reason())
        frame = frame.withColumn(f"{row}{REASON_SUFFIX}", reason)
        if self._changes_types:
            frame = self._with_wanted_changes(frame, row, target, needs_all_columns)
        return (
            self._check_contract(frame, row, target, needs_all_columns)
            if declaration.contract is not None
            else frame
        )

    def _can_move_rows(self, target: Target) -> bool:
        """Return whether a record may give a row of the target another key.

        True only for a table of mode `changes` of an ingestion with an envelope: its updates have both rows.
        """
        declaration = target.declaration
        return declaration is not None and declaration.mode == "changes" and self._ingest.envelope is not None

    def _convert_rows(
        self,
        frame: DataFrame,
        row: str,
        target: Target,
        columns: Sequence[RecordColumn],
        is_deletion: Expression | None,
    ) -> DataFrame:
        """Convert the rows of a target as `Format.convert_rows` does. Its errors name the table."""
        try:
            return self._record_format.convert_rows(frame, row, columns, is_deletion)
        except ConfigurationError as error:
            error.table = error.table or target.name
            raise

    def _with_moved_keys(self, frame: DataFrame, row: str, target: Target) -> DataFrame:
        """Add the column `<row>_moved`: a struct of the keys that the row had before an update.

        It is null if the keys did not change.
        """
        assert target.declaration is not None  # noqa: S101 - as above
        before, keys = f"{row}_before", {*target.declaration.keys}
        columns = [column for column in target.columns if column.name in keys]
        frame = self._convert_rows(frame, before, target, columns, F.lit(True))
        old, new = F.col(before), F.col(row)
        has_old_keys = [old.getField(column.name).isNotNull() for column in columns]
        has_other_keys = any_of(old.getField(column.name) != new.getField(column.name) for column in columns)
        moved = (F.col("__op") == "update") & join_balanced(and_, has_old_keys, F.lit(True)) & has_other_keys
        return frame.withColumn(f"{row}{MOVED_SUFFIX}", F.when(moved, old)).drop(
            before, f"{before}{REASON_SUFFIX}"
        )

    def _with_wanted_changes(
        self, frame: DataFrame, row: str, target: Target, needs_all_columns: Expression
    ) -> DataFrame:
        """Add the column `<row>_evolve` and convert the row to the table's types.

        The column has the schema changes that the row needs, one per line (`widen/price`, `relax/note`). It
        is null if the row fits the table or is bad.
        """
        wide_row, wants, narrow = F.col(row), [], []
        relaxed = "relax" in self._ingest.evolve
        keys = {*(target.declaration.keys if target.declaration else ()), *_identifier_columns(target)}
        for column in target.columns:
            value = wide_row.getField(column.name)
            fits = value if column.wider == column else value.try_cast(column.kind)
            narrow.append(fits.alias(column.name))
            if column.wider != column:
                is_too_narrow = fits.isNull()
                if column.kind == "float":
                    infinite = F.lit(float("inf"))
                    is_too_narrow = is_too_narrow | ((F.abs(fits) == infinite) & (F.abs(value) != infinite))
                wants.append(F.when(value.isNotNull() & is_too_narrow, f"widen/{column.name}"))
            if column.required and relaxed and column.name not in keys:
                wants.append(F.when(needs_all_columns & value.isNull(), f"relax/{column.name}"))
        wants_text = F.concat_ws("\n", *wants) if wants else F.lit("")
        good = F.col(f"{row}{REASON_SUFFIX}").isNull()
        frame = frame.withColumn(f"{row}_evolve", F.when(good & (wants_text != ""), wants_text))
        return frame.withColumn(row, F.struct(*narrow))

    def _check_contract(
        self, frame: DataFrame, row: str, target: Target, needs_all_columns: Expression
    ) -> DataFrame:
        """Add the reason "contract", with the names of the broken rules, to rows that break the contract.

        `row` is the name of the column with the rows. A row that has a reason already keeps it. Only rows of
        records for which `needs_all_columns` is true are checked: a deletion has only the keys.
        """
        assert target.declaration is not None  # noqa: S101 - as above
        rules = row_constraints(target.declaration)
        other_columns = [name for name in frame.columns if name != row]
        columns = [column.name for column in target.columns]
        opened = frame.select(*other_columns, *(F.col(row).getField(name).alias(name) for name in columns))
        breaks = [(F.coalesce(~rule.build_condition(opened), F.lit(False)), rule.name) for rule in rules]
        broken = F.array_compact(F.array(*(F.when(condition, name) for condition, name in breaks)))
        broken_text = F.concat(F.lit("Breaks "), F.array_join(broken, ", "), F.lit("."))
        fails = (
            needs_all_columns
            & any_of(is_broken for is_broken, _ in breaks)
            & F.col(f"{row}{REASON_SUFFIX}").isNull()
        )
        detail = bind_value(F.lit(0), lambda _: broken_text)
        reason = F.when(fails, build_reason("contract", detail)).otherwise(F.col(f"{row}{REASON_SUFFIX}"))
        packed = F.struct(*(F.col(quote_spark_name(name)) for name in columns)).alias(row)
        rest = [F.col(name) for name in other_columns if name != f"{row}{REASON_SUFFIX}"]
        return opened.select(*rest, reason.alias(f"{row}{REASON_SUFFIX}"), packed)

    # -- the tables of a record --------------------------------------------------------------------------

    def _is_meant_for(self, target: Target) -> Expression:
        """Return whether the record belongs to a target, by its route. Bad records belong to targets too."""
        declaration = target.declaration
        assert declaration is not None  # noqa: S101 - dead letters have no rows of this kind
        is_meant = takes_route(declaration, F.col("__route"))
        if declaration.mode != "append" and not declaration.keyed_by_record:
            # After a deletion Debezium sends a tombstone, for the compaction of the topic. It contains
            # nothing new.
            is_meant = is_meant & F.col("__value").isNotNull()
        if self._are_dead_letters:
            # The record may already be in one table and a dead letter of another table.
            is_own_table = F.col(FOR_TABLE).isNull() | (F.col(FOR_TABLE) == target.name)
            is_meant = is_meant & is_own_table & F.lit(declaration.mode == "append")
        return F.coalesce(is_meant, F.lit(False))

    def _may_write_row(self, target: Target, has_waiting: bool) -> Expression:
        """Return whether the row may be written: no waiting dead letter of the record may add the same row.

        Only tables of mode append can get rows from dead letters. `has_waiting` is whether the frame has the
        column `WAITING_TABLES`; without it, no dead letter waits.
        """
        if not has_waiting or (target.declaration and target.declaration.mode != "append"):
            return F.lit(True)
        waiting_tables = F.col(WAITING_TABLES)
        is_waiting = F.array_contains(waiting_tables, target.name) | F.array_contains(waiting_tables, "")
        return ~F.coalesce(is_waiting, F.lit(False))

    def _is_redundant_tombstone(self) -> Expression:
        if self._are_dead_letters:
            return F.lit(False)  # the record was kept as a dead letter, so it stays one
        merged = any(target.declaration and target.declaration.mode != "append" for target in self._targets)
        return F.col("__value").isNull() if merged else F.lit(False)

    def _was_read_before(self) -> Expression:
        """Return whether an earlier batch has read the record. Always false if no table is filled again.

        If such a record is bad, its dead letter exists already.
        """
        return _is_before(self._dead_letter_offsets or {})


def _without_values(
    frame: DataFrame, row: str, target: Target, names: Collection[str], *, where: Expression
) -> DataFrame:
    """Replace the values of the columns `names` by null in the rows for which a condition holds.

    A database may send nulls for all parts of a deleted row except its keys.
    """
    held = F.col(row)
    values = (
        (F.when(~where, value) if name in names else value).alias(name)
        for name, value in ((column.name, held.getField(column.name)) for column in target.columns)
    )
    return frame.withColumn(row, F.when(held.isNotNull(), F.struct(*values)))


def _is_before(offsets: Offsets) -> Expression:
    return any_of(
        (F.col("__topic") == partition.topic)
        & (F.col("__partition") == partition.partition)
        & (F.col("__offset") < offset)
        for partition, offset in sorted(offsets.items())
        if offset
    )


def row_constraints(declaration: IngestTable) -> list[RowConstraint]:
    """Return the rules of a table's contract that concern single rows; [] without a contract.

    Rules about the schema are left out. Raises ConfigurationError for other rules, such as unique values.
    """
    if declaration.contract is None:
        return []
    constraints = compile_schema(declaration.contract.to_schema())
    other_names = [
        constraint.name
        for constraint in constraints
        if not isinstance(constraint, RowConstraint | SchemaConstraint)
    ]
    if other_names:
        raise ConfigurationError(
            f"The contract has rules that are not about single rows: {', '.join(other_names)}.",
            table=declaration.asset.to_user_string(),
            hint="Remove them from this contract. Check them with pandera_checks or sql_check on an asset"
            " that reads the table.",
        )
    return [constraint for constraint in constraints if isinstance(constraint, RowConstraint)]
