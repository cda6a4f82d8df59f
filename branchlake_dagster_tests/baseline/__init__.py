"""A lake and a Dagster home as an earlier version stored them, and tests that today's code continues both.

`python -m branchlake_dagster_tests.baseline.write` writes `stored.tar.xz` and `expected.json`. They change only when
something new is stored: a restructuring of the code must pass with the old files.
"""
