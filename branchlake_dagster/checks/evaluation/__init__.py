"""Judging a frame: every constraint in one Spark job, the rest by pandera itself."""
