"""Compares the output of every command that a test runs with `--json` with its schema in docs/json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).parents[2] / "docs" / "json"
JSON_LINES = ("sda-alerts-follow", "sda-receive")
"""Schemas of commands that print a JSON document on each line."""


def schema_of(arguments: Sequence[str]) -> str:
    """The name of the schema for a command line with `--json`."""
    words = [argument for argument in arguments if not argument.startswith("-")]
    if words[0] in ("receive", "simulate"):  # hidden aliases that are older than the group `sda`
        return f"sda-{words[0]}"
    if words[:2] == ["sda", "alerts"] and "--follow" in arguments:
        return "sda-alerts-follow"
    if words[0] in ("backfill", "columns", "maintain", "sda"):
        return f"{words[0]}-{words[1]}"
    return "consumers-partitions" if words[0] == "consumers" and "--partitions" in arguments else words[0]


@cache
def validator(name: str) -> Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def check_output(arguments: Sequence[str], output: str) -> None:
    """Raise AssertionError if the output does not match the schema."""
    name = schema_of(arguments)
    for text in output.splitlines() if name in JSON_LINES else filter(None, [output.strip()]):
        # After an error, standard output is empty: the message is on standard error.
        errors = [f"{one.json_path}: {one.message}" for one in validator(name).iter_errors(json.loads(text))]
        assert not errors, f"branchlake {' '.join(arguments)}: {errors}"


def check_every_output() -> None:
    """From now on, check the output of each `CliRunner.invoke` with `--json`."""
    invoke = CliRunner.invoke

    def checked(self: CliRunner, cli: Any, args: Any = None, *more: Any, **options: Any) -> Result:
        result = invoke(self, cli, args, *more, **options)
        arguments = args.split() if isinstance(args, str) else [str(one) for one in args or ()]
        if "--json" in arguments:
            check_output(arguments, result.stdout)
        return result

    CliRunner.invoke = checked
