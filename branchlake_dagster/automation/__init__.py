"""Launch runs for partitions with new input: backlogs, the sensor, the condition, and backfills."""
