"""The records of a batch as Spark computes them before its workers divide them among the tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from operator import add, and_

from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.checks.compiler import compile_schema
from branchlake_dagster.checks.constraints import RowConstraint, SchemaConstraint
from branchlake_dagster.errors import ConfigurationError
from branchlake_dagster.ingest.batch_tables import Target
from branchlake_dagster.ingest.declaration import (
    NAME,
    NAME_LENGTH,
    TOMBSTONE,
    Expanded,
    Ingest,
    IngestTable,
    NamedTable,
)
from branchlake_dagster.ingest.formats import WHY, Format, Json
from branchlake_dagster.ingest.offsets import Offsets
from branchlake_dagster.ingest.spark_expressions import (
    any_of,
    balanced,
    because,
    bound,
    case,
    first_of,
    matches_whole,
    no_reason,
    whole,
)
from branchlake_dagster.ingest.worker_writer import MOVED, SET
from branchlake_dagster.ingest.writable_columns import beyond, bounds_of, texts_of
from branchlake_dagster.spark.session import quoted


def field(ingest: Ingest, reading: Format, name: str) -> Expression:
    """A field of the record as text, also when Kafka Connect has put schema and payload around it."""
    found = reading.text(name)
    return found if ingest.envelope is None else F.coalesce(found, reading.text(f"payload.{name}"))


def route(ingest: Ingest, reading: Format) -> Expression:
    """What routes are matched with; null where a record has none."""
    return F.col("__topic") if ingest.route_by == "topic" else field(ingest, reading, ingest.route_by)


def taken(declared: IngestTable, its_route: Expression) -> Expression:
    """Whether a table takes records of this route; null where there is none."""
    if isinstance(declared, NamedTable):
        return table_named(declared, its_route) == declared.name
    return F.lit(True) if declared.route is None else _matches(its_route, declared.route)


def table_named(family: IngestTable, its_route: Expression) -> Expression:
    """What the route puts into the name of a family's table; null where it is not of it, or no name."""
    pattern = family.route
    if pattern is None:
        name = its_route
    elif re.compile(pattern).groups:
        # Without a match, and where the group took no part, this is empty.
        name = F.regexp_extract(its_route, whole(pattern), 1)
    else:
        name = F.when(_matches(its_route, pattern), its_route)
    return F.when(matches_whole(name, NAME) & (F.length(name) <= NAME_LENGTH), name)


def _matches(its_route: Expression, pattern: str) -> Expression:
    """Whether all of a route matches; a pattern without special characters is compared, not searched for."""
    plain = re.escape(pattern) == pattern
    return its_route == pattern if plain else matches_whole(its_route, pattern)


FOR = "__for"
"""The column of dead letters that are read again: the table that could not take them."""
WAITS = "__waits"
"""The column, while a table is filled again, of the tables for which a dead letter of the record waits."""
_RECORD = ("offset", "key", "value")
_UNREADABLE = ("empty", "encoding", "syntax", "format", "schema")
"""Reasons that are about the whole value."""


def fields_taken(target: Target) -> set[str]:
    """The fields of a record that a table has columns for, also those that are filled otherwise."""
    attributes = target.declared.attributes if target.declared else {}
    return {name for column in target.columns for name in column.fields} | {*attributes}


def row_columns(targets: Sequence[Target]) -> list[str]:
    """The column with each target's rows: tables of the same columns and contract share one."""
    names: dict[object, str] = {}
    return [names.setdefault(_shape(one), f"__row{len(names)}") for one in targets]


def _shape(target: Target) -> object:
    declared = target.declared
    assert declared is not None  # noqa: S101 - dead letters have no rows of this kind
    attributes = tuple(sorted(declared.attributes.items()))
    needed = tuple(declared.keys), tuple(declared.required), frozenset(_identifiers(target)), attributes
    return target.columns, declared.contract, *needed, declared.mode == "changes", bounds_of(target)


def _identifiers(target: Target) -> set[str]:
    """Columns that Iceberg lets nobody relax."""
    return set(target.table.schema().identifier_field_names())


class Prepared:
    """The expressions of a pass."""

    def __init__(
        self,
        ingest: Expanded,
        reading: Format,
        targets: Sequence[Target],
        floors: Mapping[str, Offsets],
        dead_floor: Offsets | None,
        letters: Sequence[tuple[str, str]],
    ) -> None:
        self._ingest = ingest
        self._reading = reading
        self._targets = targets
        self._floors = floors
        self._dead_floor = dead_floor
        """Dead letters of before it are there. None: no table is filled again."""
        self._letters = letters
        """Topics and incarnations of dead letters that are read again; empty: records come from topics."""
        self._rows = row_columns(targets)

    def columns(self, frame: DataFrame) -> DataFrame:
        """The frame that workers take: of the record what is needed, its rows, and where it goes.

        What only bad records need is one struct, null for the others: each column costs on its way through
        Arrow, whatever is in it, and an array more than all others together.
        """
        frame = frame.withColumn("__op", self._operation())
        shapes = dict(zip(self._rows, self._targets, strict=True))
        for row, target in shapes.items():
            frame = self._with_rows(frame, row, target)
        frame = frame.withColumn("__route", self._route())
        again = self._dead_floor is not None
        frame = _with_all(frame, {f"__meant{n}": self._meant(one) for n, one in enumerate(self._targets)})
        waits = WAITS in frame.columns
        mine = {
            f"__mine{n}": F.col(f"__meant{n}")
            & ~_before(self._floors.get(one.name, {}))
            & self._free(one, waits)
            for n, one in enumerate(self._targets)
        }
        frame = _with_all(frame, mine)
        if again:
            dead = ~self._dead_before()
            bad = {f"__bad{n}": F.col(f"__meant{n}") & dead for n in range(len(self._targets))}
            frame = _with_all(frame, bad)
        frame = _with_all(frame, {f"__new{n}": one for n, one in enumerate(self._new_names())})
        meant = any_of(F.col(f"__meant{number}") for number in range(len(self._targets)))
        lost = ~meant & ~self._dead_before() & ~self._says_no_more()
        if self._ingest.on_unrouted == "skip":
            lost = lost & self._kept_anyway(next(iter(shapes), None))
        frame = frame.withColumn("__lost", lost)
        unfit = any_of(F.col(f"{row}{WHY}").isNotNull() for row in shapes) | F.col("__lost")
        rest = F.struct(
            *(F.col(f"__{name}").alias(name) for name in _RECORD),
            F.to_json("__headers").alias("headers"),
            *([F.col(FOR).alias("table")] if self._letters else []),
            F.when(F.col("__lost"), self._lost_because(next(iter(shapes), None))).alias("lost"),
        )
        unknown = self._unknown()
        return frame.select(
            self._topic().alias("__topic"),
            "__partition",
            "__timestamp",
            *(f"__{name}" for name in (*_RECORD, "op") if self._wants(name)),
            F.when(unfit, rest).alias("__rest"),
            *([] if unknown is None else [unknown.alias("__unknown")]),
            *(f"__new{number}" for number in range(len(self._ingest.families))),
            *self._sets("mine"),
            *(self._sets("bad") if again else []),
            *(name for row in shapes for name in (row, f"{row}{WHY}")),
            *(f"{row}{MOVED}" for row, target in shapes.items() if self._moves_rows(target)),
            *(f"{row}_evolve" for row in shapes if self._changes_types),
        )

    def _sets(self, what: str) -> list[Expression]:
        """The tables of which `what` holds, a bit for each: numbers, of which a batch has few."""
        found = []
        for group in range(0, len(self._targets), SET):
            here = range(group, min(group + SET, len(self._targets)))
            bits = [F.when(F.col(f"__{what}{number}"), 1 << number - group).otherwise(0) for number in here]
            found.append(balanced(add, bits, F.lit(0)).cast("bigint").alias(f"__{what}_{group // SET}"))
        return found

    def _kept_anyway(self, row: str | None) -> Expression:
        """Of records that no table takes those that are not skipped: nobody knows where they were to go.

        What cannot be read has no route. A dead letter that is read again stays one: left out here, it would
        be marked as put back, and be nowhere.
        """
        if self._letters:
            return F.lit(True)
        if row is None:
            return F.lit(False)
        return F.coalesce(F.col(f"{row}{WHY}").getField("kind").isin(*_UNREADABLE), F.lit(False))

    def _lost_because(self, row: str | None) -> Expression:
        """Why no table takes a record: it has no route, or it cannot be read at all."""
        named = F.coalesce("__route", F.lit("(none)"))
        reasons = [because("route", F.concat(F.lit("No table takes the route "), named))]
        if row is not None:
            why = F.col(f"{row}{WHY}")
            reasons = [F.when(why.getField("kind").isin(*_UNREADABLE), why), *reasons]
        return F.coalesce(*reasons)

    def _new_names(self) -> Iterator[Expression]:
        """By family what the record puts into the name of a table that is not known; else null."""
        for family, declared in self._ingest.families.items():
            name = table_named(declared, F.col("__route"))
            known = [one.name for one in self._ingest.named if one.family == family]
            new = ~name.isin(known) & ~self._dead_before()
            if self._letters:
                new = new & F.col(FOR).isNull()
            yield F.when(new, name)

    def _topic(self) -> Expression:
        """The topic by its place in the ingestion's list, or in that of the dead letters' topics."""
        if self._letters:
            mine = [
                (F.col("__topic") == topic) & F.col("__incarnation").eqNullSafe(incarnation)
                for topic, incarnation in self._letters
            ]
            return case([(one, F.lit(place)) for place, one in enumerate(mine)], F.lit(-1))
        names = list(self._ingest.topics)
        if len(names) == 1:
            return F.lit(0)
        return case([(F.col("__topic") == name, F.lit(place)) for place, name in enumerate(names)], F.lit(-1))

    def _wants(self, attribute: str) -> bool:
        """Whether some table takes it of every record; a merge goes by operation and offset."""
        declared = [one.declared for one in self._targets if one.declared]
        merged = attribute in ("offset", "op") and any(one.mode != "append" for one in declared)
        return merged or any(attribute in one.attributes.values() for one in declared)

    # -- what a record says of itself ------------------------------------------------------------------

    def _operation(self) -> Expression:
        """insert, update, delete or tombstone; null where the record does not say, or nonsense."""
        text = F.lower(self._operation_said())
        known = self._ingest.operations.items()
        tombstone = F.when(F.col("__value").isNull(), F.lit(TOMBSTONE))
        return F.coalesce(tombstone, *(F.when(text == word, F.lit(meaning)) for word, meaning in known))

    def _operation_said(self) -> Expression:
        ingest = self._ingest
        name = "op" if ingest.envelope == "debezium" and not ingest.operation else ingest.operation
        return F.lit(None).cast("string") if name is None else self._field(name)

    def _field(self, name: str) -> Expression:
        return field(self._ingest, self._reading, name)

    def _route(self) -> Expression:
        name = self._ingest.route_by
        columns = self._targets[0].columns if self._targets else ()
        read = next((one for one in columns if one.fields == (name,)), None)
        topic = name == "topic" or self._ingest.envelope is not None
        if topic or read is None or read.kind != "string":
            return route(self._ingest, self._reading)
        # It was read as a column already: reading JSON for it once more cost a fifth of ten tables' batch.
        row = self._rows[0]
        here = F.col(row).getField(read.name)
        return F.when(F.col(f"{row}{WHY}").isNull(), here).otherwise(self._field(name))

    def _unknown(self) -> Expression | None:
        """The names of fields that some table has no column for, as JSON; None: nobody asks."""
        wanted = "add" in self._ingest.evolve
        deleted = F.coalesce(F.col("__op") == "delete", F.lit(False))
        gone = None if self._ingest.envelope is None else deleted
        names, given = (
            self._reading.names(given=one, gone=gone) if wanted else None for one in (False, True)
        )
        if names is None or given is None:
            return None
        if not self._targets:
            return None
        known = set.intersection(*(fields_taken(one) for one in self._targets))
        others = {name for name in (self._ingest.route_by, self._ingest.operation) if name} - {"topic"}
        rest = F.array_except(names, F.array(*(F.lit(name) for name in sorted(known | others))))
        return F.when(F.size(rest) > 0, F.to_json(F.array_intersect(rest, given)))

    @property
    def _changes_types(self) -> bool:
        return bool({"widen", "relax"} & {*self._ingest.evolve})

    # -- rows ------------------------------------------------------------------------------------------

    def _with_rows(self, frame: DataFrame, row: str, target: Target) -> DataFrame:
        """The frame with a column of rows, and one of why there is none: `__row0`, `__row0_why`."""
        declared = target.declared
        assert declared is not None  # noqa: S101 - dead letters have no rows of this kind
        deleted = F.coalesce(F.col("__op").isin("delete", TOMBSTONE), F.lit(False))
        widening = "widen" in self._ingest.evolve
        columns = [one.wider for one in target.columns] if widening else list(target.columns)
        gone = None if self._ingest.envelope is None else deleted
        frame = self._reading.fit(frame, row, columns, gone)
        if self._moves_rows(target):
            frame = self._with_moved_keys(frame, row, target)
        why = F.col(f"{row}{WHY}")
        tombstone = F.coalesce(F.col("__op") == TOMBSTONE, F.lit(False))
        # What is deleted needs no more than its keys.
        whole = ~deleted if declared.mode == "changes" else ~tombstone

        def value_of(column: str) -> Expression:
            attribute = declared.attributes.get(column)
            return F.col(row).getField(column) if attribute is None else F.col(f"__{attribute}")

        fixed, relaxed = _identifiers(target), "relax" in self._ingest.evolve
        must = [one.name for one in target.columns if one.required and (not relaxed or one.name in fixed)]
        absent = [
            (value_of(column).isNull(), f"{column} is null.") for column in dict.fromkeys(declared.keys)
        ] + [
            (whole & value_of(column).isNull(), f"{column} is null.")
            for column in dict.fromkeys([*declared.required, *must])
        ]
        empty = F.col("__value").isNull(), because("empty", "The record has no value.")
        mute = F.col("__op").isNull()
        strange = (
            mute & self._operation_said().isNotNull(),
            because("operation", "Its operation is not known."),
        )
        none = mute, because("operation", "The record tells no operation.")
        changes, by_record = declared.mode == "changes", declared.keyed_by_record
        of_value = [empty, *([strange] if changes else []), (why.isNotNull(), why)]
        reasons = [(~tombstone & reason, text) for reason, text in of_value] if by_record else of_value
        bounds = (
            bounds_of(target) if isinstance(self._reading, Json) else (*bounds_of(target), *texts_of(target))
        )
        reasons += [*first_of("conversion", beyond(bounds, row)), *first_of("required", absent)]
        why = case([*reasons, *([none] if changes else [])], no_reason())
        frame = frame.withColumn(f"{row}{WHY}", why)
        if self._changes_types:
            frame = self._with_changes(frame, row, target, whole)
        return self._judged(frame, row, target, whole) if declared.contract is not None else frame

    def _moves_rows(self, target: Target) -> bool:
        """Whether a record may say that a row has another key now: an update in Debezium's envelope."""
        declared = target.declared
        return declared is not None and declared.mode == "changes" and self._ingest.envelope is not None

    def _with_moved_keys(self, frame: DataFrame, row: str, target: Target) -> DataFrame:
        """The frame with a struct of the keys that a row had before an update; null if they are the same."""
        assert target.declared is not None  # noqa: S101 - as above
        before, keys = f"{row}_before", {*target.declared.keys}
        columns = [one for one in target.columns if one.name in keys]
        frame = self._reading.fit(frame, before, columns, F.lit(True))
        old, new = F.col(before), F.col(row)
        whole = [old.getField(one.name).isNotNull() for one in columns]
        other = any_of(old.getField(one.name) != new.getField(one.name) for one in columns)
        moved = (F.col("__op") == "update") & balanced(and_, whole, F.lit(True)) & other
        return frame.withColumn(f"{row}{MOVED}", F.when(moved, old)).drop(before, f"{before}{WHY}")

    def _with_changes(self, frame: DataFrame, row: str, target: Target, whole: Expression) -> DataFrame:
        """The frame with a column of what the row wants of its table, and the row in the table's types."""
        held, wants, narrow = F.col(row), [], []
        relaxed = "relax" in self._ingest.evolve
        keys = {*(target.declared.keys if target.declared else ()), *_identifiers(target)}
        for one in target.columns:
            value = held.getField(one.name)
            fits = value if one.wider == one else value.try_cast(one.kind)
            narrow.append(fits.alias(one.name))
            if one.wider != one:
                beyond = fits.isNull()
                if one.kind == "float":
                    infinite = F.lit(float("inf"))
                    beyond = beyond | ((F.abs(fits) == infinite) & (F.abs(value) != infinite))
                wants.append(F.when(value.isNotNull() & beyond, f"widen/{one.name}"))
            if one.required and relaxed and one.name not in keys:
                wants.append(F.when(whole & value.isNull(), f"relax/{one.name}"))
        text = F.concat_ws("\n", *wants) if wants else F.lit("")
        good = F.col(f"{row}{WHY}").isNull()
        frame = frame.withColumn(f"{row}_evolve", F.when(good & (text != ""), text))
        return frame.withColumn(row, F.struct(*narrow))

    def _judged(self, frame: DataFrame, row: str, target: Target, whole: Expression) -> DataFrame:
        """Rows that break the contract, with the promises that they break."""
        assert target.declared is not None  # noqa: S101 - as above
        rules = row_rules(target.declared)
        beside = [name for name in frame.columns if name != row]
        columns = [one.name for one in target.columns]
        opened = frame.select(*beside, *(F.col(row).getField(name).alias(name) for name in columns))
        breaks = [(F.coalesce(~rule.holds(opened), F.lit(False)), rule.name) for rule in rules]
        broken = F.array_compact(F.array(*(F.when(condition, name) for condition, name in breaks)))
        told = F.concat(F.lit("Breaks "), F.array_join(broken, ", "), F.lit("."))
        fails = whole & any_of(one for one, _ in breaks) & F.col(f"{row}{WHY}").isNull()
        text = bound(F.lit(0), lambda _: told)
        why = F.when(fails, because("contract", text)).otherwise(F.col(f"{row}{WHY}"))
        packed = F.struct(*(F.col(quoted(name)) for name in columns)).alias(row)
        rest = [F.col(name) for name in beside if name != f"{row}{WHY}"]
        return opened.select(*rest, why.alias(f"{row}{WHY}"), packed)

    # -- where it goes ---------------------------------------------------------------------------------

    def _meant(self, target: Target) -> Expression:
        """Whether a target is to take the record, good or not."""
        declared = target.declared
        assert declared is not None  # noqa: S101 - dead letters have no rows of this kind
        meant = taken(declared, F.col("__route"))
        if declared.mode != "append" and not declared.keyed_by_record:
            # After a deletion Debezium sends a tombstone, for the compaction of the topic: it says no more.
            meant = meant & F.col("__value").isNotNull()
        if self._letters:
            # A record may be in one table, and a dead letter of another one.
            own = F.col(FOR).isNull() | (F.col(FOR) == target.name)
            meant = meant & own & F.lit(declared.mode == "append")
        return F.coalesce(meant, F.lit(False))

    def _free(self, target: Target, waits: bool) -> Expression:
        """Whether no waiting letter of the record may put the row there; into a merged table none may."""
        if not waits or (target.declared and target.declared.mode != "append"):
            return F.lit(True)
        held = F.col(WAITS)
        taken = F.array_contains(held, target.name) | F.array_contains(held, "")
        return ~F.coalesce(taken, F.lit(False))

    def _says_no_more(self) -> Expression:
        if self._letters:
            return F.lit(False)  # it was kept, so it stays
        merged = any(one.declared and one.declared.mode != "append" for one in self._targets)
        return F.col("__value").isNull() if merged else F.lit(False)

    def _dead_before(self) -> Expression:
        """Whether the record was taken before: if it was to be a dead letter, it is one."""
        return _before(self._dead_floor or {})


def _with_all(frame: DataFrame, columns: Mapping[str, Expression]) -> DataFrame:
    """One frame for all columns: the message to Spark may be no deeper than so many frames."""
    return frame.withColumns(dict(columns)) if columns else frame


def _before(floor: Offsets) -> Expression:
    return any_of(
        (F.col("__topic") == one.topic)
        & (F.col("__partition") == one.partition)
        & (F.col("__offset") < offset)
        for one, offset in sorted(floor.items())
        if offset
    )


def row_rules(declared: IngestTable) -> list[RowConstraint]:
    """The promises of a table's contract. Raises ConfigurationError for those that are not about one row."""
    if declared.contract is None:
        return []
    found = compile_schema(declared.contract.to_schema())
    others = [one.name for one in found if not isinstance(one, RowConstraint | SchemaConstraint)]
    if others:
        raise ConfigurationError(
            f"The contract promises {', '.join(others)}, which is not about single rows.",
            table=declared.asset.to_user_string(),
            hint="Leave it out here; pandera_checks or sql_check hold it on an asset that reads the table.",
        )
    return [one for one in found if isinstance(one, RowConstraint)]
