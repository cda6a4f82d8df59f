"""Dagster resources bound to the run's branch: the lake, the Spark session, what a retry inherits."""
