"""docs/json: every command with `--json` has a schema, and an output that breaks one fails its test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
import pytest

from branchlake_dagster.cli.main import main
from branchlake_dagster.sda.commands.demo_run import DemoResult, Line
from branchlake_dagster_tests.suite.command_line import subcommands
from branchlake_dagster_tests.suite.json_contract import SCHEMAS, check_output, schema_of, validator


def commands_with_json(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in subcommands(group):
        if any("--json" in parameter.opts for parameter in command.params):
            yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands_with_json(command, (*path, name))


NAMES = sorted(path.stem for path in SCHEMAS.glob("*.json"))


def test_every_command_with_json_has_a_schema() -> None:
    wanted = {schema_of([*words, "--json"]) for words in commands_with_json(main)}
    assert wanted | {"consumers-partitions", "sda-alerts-follow"} == set(NAMES)


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for value in schema.values():
            yield from objects(value)
    if isinstance(schema, list):
        for value in schema:
            yield from objects(value)


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_describes_each_field_and_allows_no_other(name: str) -> None:
    schema = validator(name).schema
    assert isinstance(schema, dict)
    assert schema["title"].startswith("branchlake ")
    for one in objects(schema):
        assert one["description"]
        assert "additionalProperties" in one
        for field in one.get("properties", {}).values():
            assert field["description"]


def test_the_result_of_the_demo_fits_its_schema() -> None:
    blocked = Line("r", "job", "p", "run-r", "1/2", "blocked", None, None, 1.5, "a check failed")
    published = Line("r", "job", "p", "run-r", "2/2", "passed", "c0ffee", {"sda.tracks": 3}, 1.5)
    check_output(["demo", "--json"], json.dumps(DemoResult([blocked, published], 2_000).as_dict()))


def test_each_line_of_the_receivers_is_a_document() -> None:
    ready = {"event": "ready", "sources": {"sda.radar": "127.0.0.1:9101"}, "monitor": "http://127.0.0.1:9464"}
    ended: dict[str, Any] = {"event": "ended", "intakes": []}
    lines = [json.dumps(one) for one in (ready, ended)]
    check_output(["sda", "receive", "--json"], "\n".join(lines))
    with pytest.raises(AssertionError):
        check_output(["sda", "receive", "--json"], json.dumps({**ready, "event": "ended"}))


def test_an_output_that_breaks_its_schema_is_found() -> None:
    right = [{"run_id": "r", "branch": "run-r", "attempts": 8, "reason": "broken"}]
    check_output(["set-aside", "--json"], json.dumps(right))
    for wrong in ([{**right[0], "more": 1}], [{"run_id": "r"}], [{**right[0], "attempts": "8"}]):
        with pytest.raises(AssertionError):
            check_output(["set-aside", "--json"], json.dumps(wrong))
