"""The files that the pages tell their reader to write."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
TESTING, README = ROOT / "docs" / "testing.md", ROOT / "README.md"
GETTING_STARTED, CONFLICTS = ROOT / "docs" / "getting-started.md", ROOT / "docs" / "conflicts.md"


def files(page: Path = TESTING) -> dict[str, str]:
    """Their text by name: the code blocks whose first line is a comment with the name."""
    return {
        match["name"]: match["text"]
        for match in re.finditer(
            r"^```python\n# (?P<name>\w+\.py)\n(?P<text>.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
        )
    }


def load_file(name: str, folder: Path, page: Path = TESTING, edit: tuple[str, str] = ("", "")) -> ModuleType:
    """The module that a page's reader has after saving the block `name` in `folder`, with the first text of `edit`
    replaced by the second."""
    path = folder / name
    path.write_text(files(page)[name].replace(*edit) if edit[0] else files(page)[name])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
