"""Dagster runs on their own Nessie branch of an Iceberg lake: checked, then published in one step."""
