"""Screening of the whole catalogue for close approaches."""
