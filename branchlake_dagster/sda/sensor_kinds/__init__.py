"""Kinds of sensor: one declaration each of their messages, raw table and measured values."""
