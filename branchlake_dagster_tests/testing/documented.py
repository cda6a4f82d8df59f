"""The files that docs/testing.md tells its reader to write."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def files() -> dict[str, str]:
    """Their text by name: the code blocks whose first line is a comment with the name."""
    return {
        match["name"]: match["text"]
        for match in re.finditer(
            r"^```python\n# (?P<name>\w+\.py)\n(?P<text>.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
        )
    }
