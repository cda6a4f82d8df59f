"""Avro schemas that are valid, but that Spark cannot read."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_NAMED = frozenset({"record", "error", "enum", "fixed"})
_PART_KEYS = {"array": "items", "map": "values"}
_ORDERS = frozenset({"ascending", "descending", "ignore"})
_SCHEMA_KEYS = frozenset(
    {"type", "name", "namespace", "aliases", "doc", "fields", "symbols", "size", "items", "values", "default"}
)
_FIELD_KEYS = frozenset({"name", "type", "default", "order", "aliases", "doc"})
_JAVA_DOUBLE = re.compile(
    r"[\0- ]*[+-]?(?:(?-i:NaN|Infinity)|"
    r"(?:[0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+(?:e[+-]?[0-9]+)?|"
    r"0x(?:[0-9a-f]+\.?|[0-9a-f]*\.[0-9a-f]+)p[+-]?[0-9]+)[fd]?)[\0- ]*",
    re.IGNORECASE | re.ASCII,
)
"""What `Double.valueOf` of Java accepts."""
_MAX_FIXED_BYTES = 2**31 - 9
"""The longest size of a fixed type that Avro's parser takes: the longest array of Java's virtual machines."""
_MAX_NAME_CHARACTER = 0xFFFF
"""Avro's parser looks at the two halves of characters above this one. They are neither letters nor digits."""
MAX_DECIMAL_DIGITS = 38
"""The longest precision of Spark's decimals."""


def describe_unreadable(schema: str) -> str | None:
    """Return a sentence about why Spark cannot read values of an Avro schema in JSON; None if it can.

    Spark has no types for records that contain themselves and for decimals with more than 38 digits, and does
    not distinguish fields by case. Types that the schema does not define are unknown to it, such as
    references to other subjects of a registry. Its parser refuses what Avro does not allow, such as names
    with other characters, symbols that an enum has twice, and two branches of a union with the same type.
    """
    try:
        parsed_schema = json.loads(schema)
        all_definitions = list(_iter_definitions(parsed_schema, ""))
        definitions = dict(reversed(all_definitions))
        for name, definition in all_definitions:
            if definition is not definitions[name]:
                parsed, first_parsed = (
                    _parse_definition(avro_type, namespace, definitions)
                    for avro_type, namespace in (definition, definitions[name])
                )
                if parsed != first_parsed:
                    return f"It defines type {name} twice."
        return next(_Reading(definitions).iter_problems(parsed_schema, "", ()), None)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"It is not a valid Avro schema: {type(error).__name__}."


def _iter_definitions(avro_type: Any, namespace: str) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield the full name of each named type in a type, with its definition and the namespace around it."""
    if isinstance(avro_type, list):
        for one in avro_type:
            yield from _iter_definitions(one, namespace)
    if not isinstance(avro_type, dict):
        return
    if avro_type.get("type") in _NAMED if isinstance(avro_type.get("type"), str) else False:
        name, inner_namespace = _full_name(avro_type, namespace)
        yield name, (avro_type, namespace)
        namespace = inner_namespace
    for part in _iter_parts(avro_type):
        yield from _iter_definitions(part, namespace)


def _parse_definition(definition: dict[str, Any], namespace: str, definitions: Mapping[str, Any]) -> Any:
    """Return a value that is equal for two definitions of one name if Avro takes them for equal."""
    kind, inner_namespace = definition["type"], _full_name(definition, namespace)[1]
    properties = _other_properties(definition, _SCHEMA_KEYS)
    if kind in ("record", "error"):
        fields = [_parse_field(field, inner_namespace, definitions) for field in definition["fields"]]
        return "record", fields, properties
    return kind, definition.get("symbols"), definition.get("size"), properties


def _parse_field(field: dict[str, Any], namespace: str, definitions: Mapping[str, Any]) -> Any:
    """Return a value that is equal for two fields if Avro takes them for equal."""
    field_type, default = _parse_type(field["type"], namespace, definitions), field.get("default")
    if field_type[0] in ("float", "double"):
        default = None  # Avro's parser converts texts, so a text may equal a number
    return (
        field["name"],
        field_type,
        ("default" in field, default),
        str(field.get("order", "ascending")).lower(),
        _other_properties(field, _FIELD_KEYS),
    )


def _parse_type(avro_type: Any, namespace: str, definitions: Mapping[str, Any]) -> Any:
    """Return a value that is equal for two types if Avro takes them for equal.

    A named type is its full name: its definitions are compared by themselves.
    """
    if isinstance(avro_type, list):
        return "union", [_parse_type(one, namespace, definitions) for one in avro_type]
    kind = avro_type if isinstance(avro_type, str) else avro_type["type"]
    if not isinstance(kind, str):
        return _parse_type(kind, namespace, definitions)
    name = _type_name(avro_type, namespace, definitions)
    if isinstance(avro_type, str) or kind not in _PRIMITIVES | _PART_KEYS.keys():
        return name, None, {}
    parts = [_parse_type(part, namespace, definitions) for part in _iter_parts(avro_type)]
    return name, parts or None, _other_properties(avro_type, _SCHEMA_KEYS)


def _other_properties(part: Mapping[str, Any], known_keys: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in known_keys}


def _iter_parts(avro_type: dict[str, Any]) -> Iterator[Any]:
    """Yield the types inside a type that is written as an object. Raises KeyError if it lacks them."""
    kind = avro_type["type"]
    if not isinstance(kind, str):
        yield kind
    elif kind in ("record", "error"):
        for field in avro_type["fields"]:
            yield field["type"]
    elif kind in _PART_KEYS:
        yield avro_type[_PART_KEYS[kind]]


def _full_name(avro_type: dict[str, Any], namespace: str) -> tuple[str, str]:
    """Return the full name of a named type, and the namespace of the names inside it."""
    name = avro_type["name"]
    if "." in name:
        return name.removeprefix(".") if name.rfind(".") == 0 else name, name.rpartition(".")[0]
    inner_namespace = avro_type.get("namespace", namespace)
    return f"{inner_namespace}.{name}" if inner_namespace else name, inner_namespace


def is_decimal(avro_type: Mapping[str, Any]) -> bool:
    """Return whether a type that is written as an object is a valid decimal, of bytes or a fixed type.

    Avro takes an invalid decimal for its bytes, and ignores a decimal of another type.
    """
    precision, scale = avro_type.get("precision"), avro_type.get("scale", 0)
    return (
        avro_type.get("logicalType") == "decimal"
        and avro_type.get("type") in ("bytes", "fixed")
        and isinstance(precision, int)
        and isinstance(scale, int)
        and 0 <= scale <= precision
        and 0 < precision <= max_fixed_digits(avro_type.get("size"))
    )


def max_fixed_digits(size: int | None) -> float:
    """Return the largest precision of a decimal in a fixed type of `size` bytes; infinite for other bytes."""
    return math.inf if size is None else int((8 * size - 1) * math.log10(2))


def find_field_record(schema: Any, field_name: str) -> Any:
    """Return the record type of a field of a record schema. The field may be a union of null and a record.

    The record may be defined elsewhere in the schema, as `after` of Debezium names the type of `before`.
    Raises KeyError if the field does not exist or is not a record, and TypeError if the schema is not one.
    """
    namespace, definitions = _full_name(schema, "")[1], dict(_iter_definitions(schema, ""))
    field_type = {field["name"]: field["type"] for field in schema["fields"]}[field_name]
    for branch in field_type if isinstance(field_type, list) else [field_type]:
        full_name = _find_name(branch, namespace, definitions) if isinstance(branch, str) else None
        kind = branch if full_name is None else definitions[full_name][0]
        if isinstance(kind, dict) and "fields" in kind:
            return kind
    raise KeyError(field_name)


def _find_name(name: str, namespace: str, definitions: Mapping[str, Any]) -> str | None:
    """Return the full name of the type that is called `name` in a namespace; None without a definition."""
    qualified = f"{namespace}.{name}" if namespace and "." not in name else name
    return next((one for one in (qualified, name) if one in definitions), None)


def _type_name(avro_type: Any, namespace: str, definitions: Mapping[str, Any]) -> str:
    """Return the name by which Avro distinguishes a type from others. The type must not be a union."""
    kind = avro_type if isinstance(avro_type, str) else avro_type["type"]
    if not isinstance(kind, str):
        return str(kind)
    if isinstance(avro_type, dict) and kind in _NAMED:
        return _full_name(avro_type, namespace)[0]
    if kind in _PRIMITIVES or (isinstance(avro_type, dict) and kind in _PART_KEYS):
        return kind
    return _find_name(kind, namespace, definitions) or kind


def _iter_invalid_names(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if not name or not all(map(_is_name_character, name)) or unicodedata.category(name[0]) == "Nd":
            yield f"Avro does not allow the name {name!r}."


def _is_name_character(character: str) -> bool:
    category = unicodedata.category(character)
    return character == "_" or (
        (category.startswith("L") or category == "Nd") and ord(character) <= _MAX_NAME_CHARACTER
    )


def _iter_duplicates(names: Iterable[str]) -> Iterator[str]:
    return (name for name, count in Counter(names).items() if count > 1)


def _iter_problems_of_name(avro_type: Mapping[str, Any], namespace: str) -> Iterator[str]:
    """Yield a sentence for each problem of the name and the aliases of a named type."""
    name = _full_name(dict(avro_type), namespace)[0]
    if name in _PRIMITIVES:
        yield f"A type is called {name}, like a primitive type."
    yield from _iter_problems_of_aliases(avro_type)
    aliases = [alias.rpartition(".")[2] for alias in avro_type.get("aliases", ())]
    yield from _iter_invalid_names([*name.split("."), *aliases])


def _iter_problems_of_aliases(part: Mapping[str, Any]) -> Iterator[str]:
    aliases = part.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        yield f"The aliases of {part['name']} are not a list of names."


def _iter_problems_of_field(field: Mapping[str, Any]) -> Iterator[str]:
    yield from _iter_problems_of_aliases(field)
    if "order" in field and str(field["order"]).lower() not in _ORDERS:
        yield f"Field {field['name']} has an unknown order."
    kind, default = field["type"], field.get("default")
    kind = kind["type"] if isinstance(kind, dict) else kind
    if kind in ("float", "double") and isinstance(default, str) and not _JAVA_DOUBLE.fullmatch(default):
        yield f"The default of field {field['name']} is not a number."


def _iter_problems_of_enum(avro_type: Mapping[str, Any]) -> Iterator[str]:
    if avro_type["type"] != "enum":
        return
    symbols, default = avro_type["symbols"], avro_type.get("default")
    if not isinstance(symbols, list):
        yield f"The symbols of enum {avro_type['name']} are not a list."
    yield from _iter_invalid_names(symbols)
    for symbol in _iter_duplicates(symbols):
        yield f"Enum {avro_type['name']} has the symbol {symbol} twice."
    if isinstance(default, str) and default not in symbols:
        yield f"Enum {avro_type['name']} does not have its default {default}."


def _iter_problems_of_fixed(avro_type: Mapping[str, Any]) -> Iterator[str]:
    if avro_type["type"] != "fixed":
        return
    size = avro_type["size"]
    if type(size) is not int or not 0 <= size <= _MAX_FIXED_BYTES:
        yield f"The size of type {avro_type['name']} is not a number of bytes."


class _Reading:
    """Walks through a schema as Spark does when it converts the schema to a type of its own."""

    def __init__(self, definitions: dict[str, tuple[Any, str]]) -> None:
        self._definitions = definitions
        self._readable_names: set[str] = set()

    def iter_problems(self, avro_type: Any, namespace: str, open_names: tuple[str, ...]) -> Iterator[str]:
        """Yield a sentence for each part that Spark cannot read. `open_names` are the records around it."""
        if isinstance(avro_type, list):
            yield from self._iter_problems_of_union(avro_type, namespace)
            for one in avro_type:
                yield from self.iter_problems(one, namespace, open_names)
        elif isinstance(avro_type, str):
            yield from self._iter_problems_of_reference(avro_type, namespace, open_names)
        elif not isinstance(avro_type["type"], str):
            yield "The type of an object is not a name. Write the inner type without the object around it."
        elif is_decimal(avro_type) and avro_type["precision"] > MAX_DECIMAL_DIGITS:
            yield f"A decimal has {avro_type['precision']} digits. Spark reads at most {MAX_DECIMAL_DIGITS}."
        elif avro_type["type"] in ("record", "error"):
            yield from self._iter_problems_of_record(avro_type, namespace, open_names)
        elif avro_type["type"] in ("array", "map"):
            for part in _iter_parts(avro_type):
                yield from self.iter_problems(part, namespace, open_names)
        elif avro_type["type"] in ("enum", "fixed"):
            yield from _iter_problems_of_name(avro_type, namespace)
            yield from _iter_problems_of_enum(avro_type)
            yield from _iter_problems_of_fixed(avro_type)
        else:
            yield from self._iter_problems_of_reference(avro_type["type"], namespace, open_names)

    def _iter_problems_of_union(self, branches: list[Any], namespace: str) -> Iterator[str]:
        if any(isinstance(one, list) for one in branches):
            yield "A union contains a union."
        branches = [one for one in branches if not isinstance(one, list)]
        names = [_type_name(one, namespace, self._definitions) for one in branches]
        for name in _iter_duplicates(names):
            yield f"A union has type {name} twice."

    def _iter_problems_of_reference(
        self, name: str, namespace: str, open_names: tuple[str, ...]
    ) -> Iterator[str]:
        if name in _PRIMITIVES:
            return
        full_name = _find_name(name, namespace, self._definitions)
        if full_name is None:
            yield f"It does not define type {name}."
        elif full_name in open_names:
            yield f"Record {full_name} contains itself."
        elif full_name not in self._readable_names:
            yield from self.iter_problems(*self._definitions[full_name], open_names)

    def _iter_problems_of_record(
        self, avro_type: dict[str, Any], namespace: str, open_names: tuple[str, ...]
    ) -> Iterator[str]:
        name, inner_namespace = _full_name(avro_type, namespace)
        if not isinstance(avro_type["fields"], list):
            yield f"The fields of record {name} are not a list."
        folded_names = Counter(field["name"].casefold() for field in avro_type["fields"])
        same_names = [one["name"] for one in avro_type["fields"] if folded_names[one["name"].casefold()] > 1]
        if same_names:
            yield f"Fields of record {name} have the same name in another case: {', '.join(same_names)}."
        yield from _iter_problems_of_name(avro_type, namespace)
        yield from _iter_invalid_names(one["name"] for one in avro_type["fields"])
        for field in avro_type["fields"]:
            yield from _iter_problems_of_field(field)
        for part in _iter_parts(avro_type):
            yield from self.iter_problems(part, inner_namespace, (*open_names, name))
        self._readable_names.add(name)
