"""A run's branch: its name, owner, tags, lease and heartbeats, its end, and the Dagster resources of a lake."""
