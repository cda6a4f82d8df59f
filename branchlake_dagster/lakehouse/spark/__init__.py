"""Spark sessions at a reference, and what their plans read."""
