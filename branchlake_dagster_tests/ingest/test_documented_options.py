"""docs/ingestion-reference.md lists every option with its default."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from branchlake_dagster import Ingest, IngestTable, ingest_definitions
from branchlake_dagster.ingest import formats

PAGE = Path(__file__).parents[2] / "docs" / "ingestion-reference.md"


def listed_options(heading: str) -> dict[str, str]:
    """The default by option, as the table below the heading has them."""
    _, _, rest = PAGE.read_text().partition(f"\n### {heading}\n")
    return dict(re.findall(r"^\| `(\w+)` \| ?(.*?) ?\|", rest.split("\n### ")[0], re.MULTILINE))


@pytest.mark.parametrize("declared", [Ingest, IngestTable, ingest_definitions], ids=lambda one: one.__name__)
def test_every_option_is_listed_with_its_default(declared: Callable[..., Any]) -> None:
    options = {
        name: parameter
        for name, parameter in inspect.signature(declared).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_POSITIONAL
    }
    listed = listed_options(declared.__name__)
    assert list(listed) == list(options)
    for name, parameter in options.items():
        default = listed[name].strip("`")
        if parameter.default is inspect.Parameter.empty:
            assert default == ""
            continue
        # A dataclass hides what its factories make.
        shown = eval(default, {"Json": formats.Json})
        field = getattr(declared, "__dataclass_fields__", {}).get(name)
        factory = getattr(field, "default_factory", None)
        made = factory() if callable(factory) else parameter.default
        assert shown == made, name
