"""Errors about a whole message."""

from __future__ import annotations

from branchlake_dagster import BranchlakeError, Terminal


class NotAMessage(BranchlakeError, Terminal):  # noqa: N818 - says what became of it
    """The data cannot be written as a valid message. No message was written."""


class UnreadableMessage(BranchlakeError, Terminal):  # noqa: N818 - says what became of it
    """The whole file cannot be read as a message. None of its records is used."""
