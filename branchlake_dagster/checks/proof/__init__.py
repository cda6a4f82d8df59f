"""Promises that file metadata proves: no row is read, and nothing is assumed where metadata is silent."""
