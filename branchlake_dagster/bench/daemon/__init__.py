"""What is timed beside a plain IO manager, and through a real `dagster dev`: its floor, and backfills."""
