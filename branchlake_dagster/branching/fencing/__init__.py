"""Ending a branch so that nobody can write to it any more, and saying so on its run."""
