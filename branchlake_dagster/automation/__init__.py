"""Runs for partitions with new input: backlog, sensor, condition, and backfills of consumers."""
