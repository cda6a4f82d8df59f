"""Merge the catalogs of many sources into one registry, with the history and the state of each object."""
