"""The API reference: `python docs/make_api.py FOLDER` writes it as HTML, made from the docstrings by pdoc.

It holds what `branchlake_dagster` and `branchlake_dagster.testing` offer, and no module behind them.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from textwrap import dedent

import pdoc
import pdoc.docstrings

MODULES = ("branchlake_dagster", "branchlake_dagster.testing")
_OTHERS = r"!branchlake_dagster\.(?!testing$)"
_EXAMPLES = re.compile(r"^Examples:\n((?:[ \t]+.*\n?|\n)+)", re.MULTILINE)
_rst = pdoc.docstrings.rst


def _with_examples(text: str, source: Path | None) -> str:
    """A section becomes a quotation with its code block beside it, so this one is made none."""
    return _EXAMPLES.sub(lambda found: f"**Example**\n\n{dedent(found[1]).strip()}\n", _rst(text, source))


def main(folder: str) -> None:
    """Write the reference into `folder`."""
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            getattr(module, name)  # pdoc looks at what is loaded, and these are loaded when asked for
    pdoc.docstrings.rst = _with_examples
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*MODULES, _OTHERS, output_directory=Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
