"""The quality gate: evidence from Dagster, and the verdict on it."""
