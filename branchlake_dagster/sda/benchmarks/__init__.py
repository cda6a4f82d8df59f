"""Benchmarks of the Space Domain Awareness graph, run by `branchlake bench`."""
