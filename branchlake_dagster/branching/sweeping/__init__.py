"""Deleting the files that discarded branches left behind."""
