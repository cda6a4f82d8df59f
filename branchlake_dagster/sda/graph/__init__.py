"""The Space Domain Awareness graph as Dagster definitions: assets, checks, jobs, schedules, sensors."""
