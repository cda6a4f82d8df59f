"""Benchmarks of the Space Domain Awareness pipeline."""
