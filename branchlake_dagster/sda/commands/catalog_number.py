"""The type of options with a catalog number. Importing it imports nothing but click."""

from __future__ import annotations

import click

CATALOG_NUMBER = click.IntRange(0, 999_999_999)
"""Catalog numbers have at most nine digits."""
