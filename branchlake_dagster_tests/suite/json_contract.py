"""Whatever a command prints with `--json` in a test is compared with the schema that docs/json has for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).parents[2] / "docs" / "json"
WITHOUT_SCHEMA = ("bench", "demo", "sda", "receive", "simulate")
"""Commands whose figures are for people who compare them; docs/json/README.md says so."""


def schema_of(arguments: Sequence[str]) -> str | None:
    """The name of the schema for a command line with `--json`; None if its output is under no contract."""
    words = [argument for argument in arguments if not argument.startswith("-")]
    if not words or words[0] in WITHOUT_SCHEMA:
        return None
    if words[0] in ("backfill", "columns"):
        return f"{words[0]}-{words[1]}"
    return "consumers-partitions" if words[0] == "consumers" and "--partitions" in arguments else words[0]


@cache
def validator(name: str) -> Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def check_output(arguments: Sequence[str], output: str) -> None:
    """Raise AssertionError if the output is not what the schema promises."""
    name = schema_of(arguments)
    if name is None or not output.strip():
        return  # an error is a sentence on standard error
    found = json.loads(output)
    errors = [f"{error.json_path}: {error.message}" for error in validator(name).iter_errors(found)]
    assert not errors, f"branchlake {' '.join(arguments)}: {errors}"


def check_every_output() -> None:
    """From now on each `CliRunner.invoke` with `--json` compares what was printed."""
    invoke = CliRunner.invoke

    def checked(self: CliRunner, cli: Any, args: Any = None, *more: Any, **options: Any) -> Result:
        result = invoke(self, cli, args, *more, **options)
        arguments = args.split() if isinstance(args, str) else [str(one) for one in args or ()]
        if "--json" in arguments:
            check_output(arguments, result.stdout)
        return result

    CliRunner.invoke = checked  # type: ignore[method-assign]
