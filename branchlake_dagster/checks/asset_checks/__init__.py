"""Contracts and SQL as Dagster asset checks: specs, checks, reports."""
