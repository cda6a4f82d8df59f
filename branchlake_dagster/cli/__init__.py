"""The command line: `branchlake …`."""

from branchlake_dagster.cli.main import main

__all__ = ["main"]
