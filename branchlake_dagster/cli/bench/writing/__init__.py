"""Benchmarks of writing frames: a materialization beside a plain one, and upserts by each engine."""
