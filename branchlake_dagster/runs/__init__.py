"""Manage a run's branch, owner, tags, leases and heartbeats, and provide the lake as Dagster resources."""
