"""Where a record goes, as expressions of Spark: its route, and the table that it names."""

from __future__ import annotations

import re

from pyspark.sql import Column as Expression
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark reader expects

from branchlake_dagster.ingest.converting.expressions import matches_whole, whole
from branchlake_dagster.ingest.converting.formats import Format
from branchlake_dagster.ingest.declaring.declaration import Ingest, IngestTable
from branchlake_dagster.ingest.declaring.families import NAME, NAME_LENGTH, NamedTable


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
