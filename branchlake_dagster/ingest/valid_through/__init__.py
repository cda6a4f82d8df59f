"""Waiting for the valid-through time of ingested tables and of consumers of their changes."""
