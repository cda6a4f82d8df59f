"""Protocols that records come in by."""
