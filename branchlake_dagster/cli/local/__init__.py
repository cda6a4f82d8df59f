"""Dagster on this machine: its home, `dagster dev`, and the demo that runs in them."""
