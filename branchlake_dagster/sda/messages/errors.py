"""What is wrong with a message as a whole."""

from __future__ import annotations

from branchlake_dagster import BranchlakeError, Terminal


class NotAMessage(BranchlakeError, Terminal):  # noqa: N818 - says what became of it
    """What was given cannot be said in a valid message; nothing was written of it."""


class UnreadableMessage(BranchlakeError, Terminal):  # noqa: N818 - says what became of it
    """A file as a whole is no message that can be read; nothing was taken from it."""
