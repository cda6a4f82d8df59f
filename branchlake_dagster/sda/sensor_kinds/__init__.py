"""Kinds of sensor, one declaration each: what their bytes are, and what becomes of them in the pipeline."""
