"""Histories of an ingestion in which anything fails at any point; at the end each token is there exactly once."""
