"""Launching work when something was published."""
