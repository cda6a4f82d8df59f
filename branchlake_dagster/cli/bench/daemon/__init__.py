"""What is timed through a real `dagster dev`: its floor, and backfills beside a plain IO manager's."""
