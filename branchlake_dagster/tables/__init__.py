"""Declare the table of an asset, evolve its schema and partitions, and read and write its rows."""
