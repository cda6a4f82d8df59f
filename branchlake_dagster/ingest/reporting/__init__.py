"""What Dagster is told of batches, topics and receivers."""
