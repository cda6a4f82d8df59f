"""Read the four encodings of Orbit Mean-Elements Messages (OMM): JSON, CSV, XML and KVN.

`read_json` and `read_csv` also read satellite catalogs, which have other keywords.

An OMM has the element set of one object. KVN is text with lines of ``keyword = value``. JSON and CSV are read
as CelesTrak and Space-Track serve them, XML as NDM/XML (CCSDS 505.0-B). Every reader returns one frame with a
column for each keyword in the file. All values stay text, so that no digit is lost before the single
conversion in `omm`.

A frame also has ``line_number`` and ``raw_text``; ``raw_text`` is empty if the keywords represent the record.
For a record that cannot be read, ``broken`` holds the message and ``broken_as`` the `RejectReason`.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection
from typing import Any
from xml.parsers import expat

import polars as pl

from branchlake_dagster.sda.gp.limits import ReadLimits
from branchlake_dagster.sda.gp.omm import KEYWORDS
from branchlake_dagster.sda.gp.records import UnreadableCatalogueError
from branchlake_dagster.sda.gp.rules import RejectReason

_COLUMNS = {
    **dict.fromkeys(KEYWORDS, pl.String()),
    "line_number": pl.Int64(),
    "raw_text": pl.String(),
    "broken": pl.String(),
    "broken_as": pl.String(),
}
_FIELD_PATTERN = r'(?:[^",]*|"(?:[^"]|"")*")'
_ROW_PATTERN = f"^{_FIELD_PATTERN}(?:,{_FIELD_PATTERN})*$"
_SURROGATE_ESCAPE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
_NAMES = ("OBJECT_NAME", "OBJECT_ID")
_MAX_DEPTH = 64
"""Maximum nesting depth of XML elements; an OMM in NDM/XML has seven levels."""


def from_json(file_text: str, source: str, limits: ReadLimits) -> pl.DataFrame:
    """Read a JSON array of OMM messages, or a single message (`read_json`)."""
    return read_json(file_text, source, limits, KEYWORDS)


def read_json(file_text: str, source: str, limits: ReadLimits, keywords: Collection[str]) -> pl.DataFrame:
    """Read a JSON array of records, or a single record. Numbers may be JSON numbers or text.

    A record is marked as broken if it is not a flat object, or if the value of a keyword is not valid
    Unicode. The frame has a column for each of the `keywords`.

    Raises:
        UnreadableCatalogueError: the text is not JSON, or the JSON is not an array or an object.

    """
    try:
        # Decimals stay text: `omm` converts whole columns, and exactly once.
        decoded_json = json.loads(file_text, parse_float=str, parse_int=str, parse_constant=str)
        records = [decoded_json] if isinstance(decoded_json, dict) else decoded_json
        if not isinstance(records, list):
            raise UnreadableCatalogueError(
                source, "the JSON is not an array of records", "Give a JSON file of the provider."
            )
        problems = ["" if _is_flat(r) else "the record is not a flat object of keywords" for r in records]
        # JSON can escape half of a character, which no encoding of text can hold.
        if _SURROGATE_ESCAPE.search(file_text):
            problems = [
                problem
                or ("" if _has_unicode_texts(r, keywords) else "a value of the record is not valid Unicode")
                for r, problem in zip(records, problems, strict=True)
            ]
        raw_texts = [
            json.dumps(r)[: limits.max_record_chars] if problem else ""
            for r, problem in zip(records, problems, strict=True)
        ]
    except json.JSONDecodeError as error:
        raise UnreadableCatalogueError(
            source,
            f"the JSON is invalid at line {error.lineno}, column {error.colno}",
            "Fetch the file again.",
        ) from error
    except RecursionError as error:
        raise UnreadableCatalogueError(
            source, "the JSON is nested too deeply", "A record is a flat object. Fetch the file again."
        ) from error
    usable_records = [{} if problem else r for r, problem in zip(records, problems, strict=True)]
    frame = pl.DataFrame(
        usable_records, schema=dict.fromkeys(keywords, pl.String), strict=False, orient="row"
    )
    return frame.with_columns(
        pl.Series("raw_text", raw_texts, dtype=pl.String),
        pl.Series("line_number", range(1, len(raw_texts) + 1), dtype=pl.Int64),
        pl.Series("broken", [problem or None for problem in problems], dtype=pl.String),
    ).with_columns(
        broken_as=pl.when(pl.col("broken").is_not_null()).then(pl.lit(str(RejectReason.UNSUPPORTED_MESSAGE))),
    )


def _is_flat(record: object) -> bool:
    return isinstance(record, dict) and not any(isinstance(v, dict | list) for v in record.values())


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8. A file name with other bytes cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _has_unicode_texts(record: dict[str, Any], keywords: Collection[str]) -> bool:
    texts = (value for keyword in keywords if isinstance(value := record.get(keyword), str))
    return all(map(is_unicode, texts))


def from_csv(file_text: str, source: str, limits: ReadLimits, first_line: int = 1) -> pl.DataFrame:
    """Read CSV whose header holds OMM keywords (`read_csv`).

    `first_line` is the number of the text's first line in the file.
    """
    return read_csv(file_text, source, limits, KEYWORDS, ("NORAD_CAT_ID",), first_line)


def read_csv(
    file_text: str,
    source: str,
    limits: ReadLimits,
    keywords: Collection[str],
    key_names: Collection[str],
    first_line: int = 1,
) -> pl.DataFrame:
    """Read CSV whose header holds `keywords`, in any order and mixed with other names.

    A row is marked as broken if its number of fields differs from the header's, if it has a damaged quote, or
    if it is too long. Quoted values cannot contain line breaks. The case of upper-case keywords is ignored.
    `key_names` are the keywords of which the header must have one. `first_line` is the number of the text's
    first line in the file. The text must not be blank.

    Raises:
        UnreadableCatalogueError: the header repeats a name or lacks the key names.

    """
    lines = (
        pl.DataFrame({"raw_text": pl.Series(file_text.split("\n"), dtype=pl.String)})
        .with_row_index("line_number", offset=first_line)
        .with_columns(
            pl.col("line_number").cast(pl.Int64), pl.col("raw_text").str.strip_chars_end(" \t\x00\x1a")
        )
        .filter(pl.col("raw_text") != "")
    )
    # A quoted comma does not separate fields, so quoted texts are removed before commas are counted.
    unquoted_text = pl.col("raw_text").str.replace_all(r'"[^"]*"', "")
    lines = lines.with_columns(
        fields=unquoted_text.str.count_matches(",", literal=True).cast(pl.Int64) + 1,
        odd_quote=pl.col("raw_text").str.contains('"', literal=True)
        & ~pl.col("raw_text").str.contains(_ROW_PATTERN),
        long=pl.col("raw_text").str.len_chars() > limits.max_record_chars,
    )
    field_count = lines["fields"][0]
    parts = [part.strip().strip('"').strip() for part in lines["raw_text"][0].split(",")]
    header_names = [part.upper() if part.upper() in keywords else part for part in parts]
    if (
        not {*key_names} & {*header_names}
        or len(header_names) != field_count
        or len(set(header_names)) < field_count
    ):
        raise UnreadableCatalogueError(
            source,
            f"the CSV header repeats a name or has no {next(iter(key_names))}",
            "Give a CSV file of the provider.",
        )
    lines = (
        lines.slice(1)
        .with_columns(
            broken=pl.when(pl.col("long"))
            .then(pl.format("the row has more than {} characters", pl.lit(limits.max_record_chars)))
            .when(pl.col("odd_quote"))
            .then(pl.lit("a quote is not closed, or is inside an unquoted field"))
            .when(pl.col("fields") != field_count)
            .then(
                pl.format("the row has {} fields, the header has {}", pl.col("fields"), pl.lit(field_count))
            ),
            broken_as=pl.when(pl.col("long"))
            .then(pl.lit(str(RejectReason.RECORD_LENGTH)))
            .otherwise(pl.lit(str(RejectReason.TRUNCATED))),
        )
        .drop("fields", "odd_quote", "long")
    )
    complete_rows, broken_rows = (
        lines.filter(pl.col("broken").is_null()),
        lines.filter(pl.col("broken").is_not_null()),
    )
    if complete_rows.height:
        csv_bytes = io.BytesIO(("\n".join(complete_rows["raw_text"].to_list()) + "\n").encode())
        values = pl.read_csv(csv_bytes, has_header=False, new_columns=header_names, infer_schema=False)
        complete_rows = pl.concat(
            [complete_rows, values.select(n for n in header_names if n in keywords)], how="horizontal"
        )
    return pl.concat([complete_rows, broken_rows], how="diagonal").sort("line_number")


def from_kvn(file_text: str, source: str, limits: ReadLimits, first_line: int = 1) -> pl.DataFrame:
    """Read keyword = value notation (KVN). Each ``CCSDS_OMM_VERS`` starts a message; units in [] are dropped.

    Names have no units: ``OBJECT_NAME = ISS [+]`` keeps its brackets.

    `first_line` is the number of the text's first line in the file.

    Raises:
        UnreadableCatalogueError: the text has no ``CCSDS_OMM_VERS``.

    """
    pair_pattern = r"^\s*([A-Za-z_0-9]+)\s*=\s*(.*?)\s*$"
    lines = (
        pl.DataFrame({"text": pl.Series(file_text.split("\n"), dtype=pl.String)})
        .with_row_index("line_number", offset=first_line)
        .filter(pl.col("text").str.strip_chars(" \t\x00\x1a") != "")
        .filter(~pl.col("text").str.contains(r"^\s*COMMENT(\s|$)"))
        .with_columns(
            pl.col("line_number").cast(pl.Int64),
            long=pl.col("text").str.len_chars() > limits.max_record_chars,
            key=pl.col("text").str.extract(pair_pattern, 1).str.to_uppercase(),
            value=pl.col("text").str.extract(pair_pattern, 2),
        )
        .with_columns(
            value=pl.when(pl.col("key").is_in(_NAMES))
            .then(pl.col("value"))
            .otherwise(pl.col("value").str.replace(r"\s*\[[^\]]*\]$", ""))
        )
        # These lines only mark blocks. Maneuver and covariance blocks have keywords of their own.
        .filter(~pl.col("text").str.contains(r"^\s*(META|DATA|COVARIANCE)_(START|STOP)\s*$"))
        .with_columns(message=(pl.col("key") == "CCSDS_OMM_VERS").fill_null(False).cum_sum())
        .filter(pl.col("message") > 0)
    )
    if not lines.height:
        raise UnreadableCatalogueError(
            source,
            "the KVN has no CCSDS_OMM_VERS",
            "Each message begins with this keyword. Give an OMM in KVN.",
        )
    is_bad_line = pl.col("key").is_null() | pl.col("long")
    frame = lines.group_by("message", maintain_order=True).agg(
        pl.col("line_number").first(),
        raw_text=pl.lit(""),
        broken=pl.when(is_bad_line.any()).then(
            pl.format(
                "line {} is not a valid keyword = value line",
                pl.col("line_number").filter(is_bad_line).first(),
            )
        ),
        broken_as=pl.when(pl.col("long").any())
        .then(pl.lit(str(RejectReason.RECORD_LENGTH)))
        .otherwise(pl.lit(str(RejectReason.TRUNCATED))),
    )
    keyword_lines = lines.filter(pl.col("key").is_in(KEYWORDS))
    if not keyword_lines.height:
        return frame.drop("message")
    values = keyword_lines.pivot(on="key", index="message", values="value", aggregate_function="last")
    return frame.join(values, on="message", how="left", maintain_order="left").drop("message")


def from_xml(file_text: str, source: str, limits: ReadLimits) -> pl.DataFrame:
    """Read NDM/XML with any number of ``omm`` elements, below ``ndm`` or alone, in any namespace.

    Raises:
        UnreadableCatalogueError: the text is not well-formed XML, declares a DTD or is nested too deeply.

    """
    reader = _OmmXmlReader(source, limits)
    try:
        reader.parser.Parse(file_text.encode(), True)
    except expat.ExpatError as error:
        raise UnreadableCatalogueError(
            source, f"the XML is invalid ({error})", "Fetch the file again."
        ) from error
    return pl.DataFrame(reader.rows, schema=_COLUMNS, strict=False, orient="row")


class _OmmXmlReader:
    """Collects the keywords of each message from the events of expat, without building a tree."""

    def __init__(self, source: str, limits: ReadLimits) -> None:
        self.rows: list[dict[str, Any]] = []
        self._source = source
        self._limits = limits
        self._depth = 0
        self._keyword: str | None = None
        self._value_parts: list[str] = []
        # The text is decoded already, so the encoding in the XML declaration is ignored.
        self.parser = expat.ParserCreate("utf-8", " ")
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start_element
        self.parser.EndElementHandler = self._end_element
        self.parser.CharacterDataHandler = self._collect_characters
        # Entity expansion can exhaust memory, and NDM messages need neither a DTD nor entities.
        self.parser.StartDoctypeDeclHandler = self._reject_doctype
        self._keywords = frozenset(KEYWORDS)

    def _reject_doctype(self, *_: object) -> None:
        raise UnreadableCatalogueError(
            self._source, "the XML declares a DTD", "NDM/XML does not need a DTD. Remove it."
        )

    def _start_element(self, tag: str, _: object) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnreadableCatalogueError(
                self._source, f"the XML is nested deeper than {_MAX_DEPTH}", "Give an NDM/XML file."
            )
        name = tag.rpartition(" ")[2]
        if name == "omm":
            self.rows.append({"line_number": self.parser.CurrentLineNumber, "raw_text": ""})
        self._keyword = name if name in self._keywords and self.rows else None
        self._value_parts = []

    def _collect_characters(self, data: str) -> None:
        if self._keyword is not None:
            self._value_parts.append(data)

    def _end_element(self, _: str) -> None:
        self._depth -= 1
        if self._keyword is not None:
            row, value = self.rows[-1], "".join(self._value_parts).strip()
            if len(value) > self._limits.max_record_chars:
                row["broken"] = f"{self._keyword} has more than {self._limits.max_record_chars} characters"
                row["broken_as"] = str(RejectReason.RECORD_LENGTH)
                value = ""
            row[self._keyword] = value
            self._keyword = None
