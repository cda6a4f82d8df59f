"""Spark sessions that work on one Nessie reference, and the detection of what they read."""
