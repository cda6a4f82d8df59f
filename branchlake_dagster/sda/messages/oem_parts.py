"""Divide an Orbit Ephemeris Message of either notation into metadata and a frame of states, all as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from xml.parsers import expat

import polars as pl

from branchlake_dagster.sda.gp.limits import ReadLimits, decode_gp_file
from branchlake_dagster.sda.gp.records import CatalogueError
from branchlake_dagster.sda.messages.errors import UnreadableMessage

FIELDS = ("epoch", "x", "y", "z", "x_dot", "y_dot", "z_dot")
_STATE = tuple(name.upper() for name in FIELDS)
_ACCELERATION = 3
_COLUMNS = {
    "segment": pl.Int64(),
    "line_number": pl.Int64(),
    "raw_text": pl.String(),
    "broken": pl.String(),
    **dict.fromkeys(FIELDS, pl.String()),
}
_MAX_DEPTH = 16
_MAX_SEGMENTS = 10_000
_MARK = "CCSDS_OEM_VERS"


@dataclass
class Metadata:
    """The keywords of a segment, the line in which it begins, and a keyword that occurs twice, if any."""

    line: int
    values: dict[str, str] = field(default_factory=dict)
    repeated: str | None = None

    def add(self, keyword: str, value: str) -> None:
        """Add a keyword. If it exists already, it is recorded in `repeated`."""
        if keyword in self.values:
            self.repeated = keyword
        self.values[keyword] = value.strip()


@dataclass(frozen=True)
class Parts:
    """The version, the metadata of each segment, and the states of all segments.

    The column `segment` counts the segments from 1, and `FIELDS` are text. `broken` explains an unusable
    line.
    """

    version: str
    segments: list[Metadata]
    states: pl.DataFrame


def parts_of(content: bytes, source: str, limits: ReadLimits) -> Parts:
    """Divide a file of either notation into its parts.

    Raises:
        UnreadableMessage: The file is empty, too large, damaged as a whole, or not such a message.
    """
    try:
        text = decode_gp_file(content, source, limits)
    except CatalogueError as error:
        raise _unreadable(source, error.problem, "damaged") from error
    head = text.lstrip("\ufeff \t\n")
    if not head:
        raise _unreadable(source, "it is empty", "empty")
    parts = _from_xml(text, source, limits) if head.startswith("<") else _from_kvn(text, source, limits)
    if not parts.segments:
        raise _unreadable(source, "it has no segment", "no_segment")
    if len(parts.segments) > _MAX_SEGMENTS:
        raise _unreadable(source, f"it has more than {_MAX_SEGMENTS:,} segments", "too_many_segments")
    return parts


def _unreadable(source: str, problem: str, reason: str) -> UnreadableMessage:
    return UnreadableMessage(
        f"Ephemeris file {source} cannot be read: {problem}.",
        hint="Give an OEM (CCSDS 502.0-B) in KVN or XML.",
        reason=reason,
        subject=source,
    )


def _from_kvn(text: str, source: str, limits: ReadLimits) -> Parts:
    stripped = pl.col("raw_text").str.strip_chars(" \t\x00\x1a")
    lines = (
        pl.DataFrame({"raw_text": pl.Series(text.split("\n"), dtype=pl.String)})
        .with_row_index("line_number", offset=1)
        .with_columns(stripped, pl.col("line_number").cast(pl.Int64))
        .filter((pl.col("raw_text") != "") & ~pl.col("raw_text").str.contains(r"^COMMENT(\s|$)"))
    )
    marks = {
        name: (pl.col("raw_text") == name).cum_sum()
        for name in ("META_START", "META_STOP", "COVARIANCE_START", "COVARIANCE_STOP")
    }
    lines = lines.with_columns(
        segment=marks["META_START"].cast(pl.Int64),
        meta=marks["META_START"] > marks["META_STOP"],
        covariance=marks["COVARIANCE_START"] > marks["COVARIANCE_STOP"],
    ).filter(~pl.col("raw_text").is_in(["META_STOP", "COVARIANCE_STOP", "COVARIANCE_START"]))
    version = _version(lines, source)
    begins = lines.filter(pl.col("raw_text") == "META_START")["line_number"].to_list()
    if len(begins) > _MAX_SEGMENTS:
        raise _unreadable(source, f"it has more than {_MAX_SEGMENTS:,} segments", "too_many_segments")
    segments = [Metadata(line) for line in begins]
    inside = lines.filter(pl.col("meta") & (pl.col("segment") > 0) & (pl.col("raw_text") != "META_START"))
    for segment, line in inside.select("segment", "raw_text").iter_rows():
        keyword, _, value = line.partition("=")
        segments[segment - 1].add(keyword.strip(), value[: limits.max_record_chars])
    rows = lines.filter((pl.col("segment") > 0) & ~pl.col("meta") & ~pl.col("covariance"))
    return Parts(version, segments, _states(rows, limits))


def _version(lines: pl.DataFrame, source: str) -> str:
    first = lines["raw_text"][0] if lines.height else ""
    keyword, _, value = first.partition("=")
    if keyword.strip() != _MARK:
        raise _unreadable(source, f"it does not begin with {_MARK}", "beginning")
    return value.strip()


def _states(rows: pl.DataFrame, limits: ReadLimits) -> pl.DataFrame:
    long = pl.col("raw_text").str.len_chars() > limits.max_record_chars
    rows = rows.with_columns(long=long, parts=pl.col("raw_text").str.slice(0, 4_096).str.extract_all(r"\S+"))
    count = pl.col("parts").list.len()
    return rows.select(
        "segment",
        "line_number",
        "raw_text",
        pl.when("long")
        .then(pl.format("the line has more than {} characters", pl.lit(limits.max_record_chars)))
        .when(~count.is_in([len(FIELDS), len(FIELDS) + _ACCELERATION]))
        .then(pl.format("the line has {} items, expected 7, or 10 with acceleration", count))
        .alias("broken"),
        *(pl.col("parts").list.get(k, null_on_oob=True).alias(name) for k, name in enumerate(FIELDS)),
    )


def _from_xml(text: str, source: str, limits: ReadLimits) -> Parts:
    reader = _Reader(source, limits)
    try:
        reader.parser.Parse(text.encode(), True)
    except expat.ExpatError as error:
        raise _unreadable(source, f"it is not XML ({error})", "not_xml") from error
    if reader.version is None:
        raise _unreadable(source, "it has no oem element", "no_oem")
    return Parts(
        reader.version,
        reader.segments,
        pl.DataFrame(reader.rows, schema=_COLUMNS, orient="row", strict=False),
    )


class _Reader:
    """Collects metadata and states from the events of expat, without building a tree."""

    def __init__(self, source: str, limits: ReadLimits) -> None:
        self.version: str | None = None
        self.segments: list[Metadata] = []
        self.rows: list[dict[str, Any]] = []
        self._source, self._limits = source, limits
        self._path: list[str] = []
        self._text: list[str] = []
        self._size = 0
        # The text is already decoded, so the encoding in the XML declaration is ignored.
        self.parser = expat.ParserCreate("utf-8", " ")
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._characters
        # Entity expansion can exhaust memory, and messages need neither a DTD nor entities.
        self.parser.StartDoctypeDeclHandler = self._doctype

    def _doctype(self, *_: object) -> None:
        raise _unreadable(self._source, "the XML declares a DTD", "dtd")

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        name = tag.rpartition(" ")[2]
        self._path.append(name)
        if len(self._path) > _MAX_DEPTH:
            raise _unreadable(self._source, f"the XML is nested deeper than {_MAX_DEPTH}", "depth")
        if name == "oem":
            if self.version is not None:
                raise _unreadable(self._source, "it has several messages: give each a file", "several")
            self.version = attributes.get("version", "")
        elif name == "metadata" and self.version is not None:
            self.segments.append(Metadata(self.parser.CurrentLineNumber))
        elif name == "stateVector" and self.segments:
            self.rows.append(
                {"segment": len(self.segments), "line_number": self.parser.CurrentLineNumber, "raw_text": ""}
            )
        self._text, self._size = [], 0

    def _characters(self, data: str) -> None:
        self._size += len(data)
        if self._size <= self._limits.max_record_chars:
            self._text.append(data)

    def _end(self, _: str) -> None:
        name = self._path.pop()
        inside = self._path[-1] if self._path else ""
        value = "".join(self._text).strip()
        if inside == "metadata" and name != "COMMENT" and self.segments:
            self.segments[-1].add(name, value)
        elif inside == "stateVector" and self.rows and name in _STATE:
            row = self.rows[-1]
            if self._size > self._limits.max_record_chars:
                row["broken"] = f"{name} has more than {self._limits.max_record_chars} characters"
            elif name.lower() in row:
                row["broken"] = f"{name} stands twice"
            row[name.lower()] = value
            row["raw_text"] = f"{row['raw_text']} {value}"[:4_096].strip()
        self._text, self._size = [], 0
