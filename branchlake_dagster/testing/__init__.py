"""Tests of your own assets: a throw-away lake, runs, the real gate and publication, in the test's process.

With pytest, in `conftest.py`::

    pytest_plugins = ["branchlake_dagster.testing.fixtures"]

which gives the fixture `lake`; without pytest, `with throwaway_lake() as lake:`.
"""

from branchlake_dagster.testing.lake import ThrowawayLake
from branchlake_dagster.testing.server import ThrowawayServer, throwaway_lake, throwaway_server

__all__ = ["ThrowawayLake", "ThrowawayServer", "throwaway_lake", "throwaway_server"]
