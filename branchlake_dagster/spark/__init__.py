"""Spark sessions that work on one Nessie reference, and what they read."""
