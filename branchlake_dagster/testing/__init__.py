"""Test tools for your own assets: a throw-away lake with runs, the real gate and publication in one process.

For pytest, load the fixture `lake` in `conftest.py`::

    pytest_plugins = ["branchlake_dagster.testing.fixtures"]

Without pytest, use `with throwaway_lake() as lake:`.
"""

from branchlake_dagster.testing.lake import ThrowawayLake
from branchlake_dagster.testing.server import ThrowawayServer, throwaway_lake, throwaway_server

__all__ = ["ThrowawayLake", "ThrowawayServer", "throwaway_lake", "throwaway_server"]
