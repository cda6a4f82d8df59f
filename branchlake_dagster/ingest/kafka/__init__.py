"""Kafka: the cluster's options, its topics as they are now, and a broker of our own for trials and tests."""
