"""A run's branch: name, owner, tags, lease, heartbeats, its end, and the lake as Dagster resources."""
