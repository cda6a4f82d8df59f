"""A branch for every run, and an IO manager that reads and writes Dagster assets on it."""
