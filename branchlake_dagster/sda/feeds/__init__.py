"""Simulate the messages of live sensors, byte for byte, at any rate. A seed makes them reproducible."""
