"""Where records are handed over: Kafka, or files that stand for it."""
