"""What a tick of the publication sensor says of its pass, in a text that stays short."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from branchlake_dagster.publication.reconcile.outcome import CheckRun, Outcome, PublicationAction
from branchlake_dagster.wording import agree

_EXAMPLES = 10
_LONGEST = 300
_LOGGED = 500
_COUNTED = (
    PublicationAction.WAITING,
    PublicationAction.KEPT,
    PublicationAction.UNKNOWN_RUN,
    PublicationAction.SET_ASIDE,
)
"""Said of branches that are left alone, at every tick again: 4,300 of them gave 459,000 characters."""


@dataclass
class Tick:
    """The outcomes of one pass: counted, the first ones in words, and the runs to launch."""

    counts: Counter[PublicationAction] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    check_runs: list[CheckRun] = field(default_factory=list)

    def add(self, outcome: Outcome) -> bool:
        """Whether the outcome is worth a line in the log."""
        self.counts[outcome.action] += 1
        if outcome.check_run:
            self.check_runs.append(outcome.check_run)
        if outcome.action in _COUNTED:
            return False
        if len(self.examples) < _EXAMPLES:
            text = str(outcome)
            self.examples.append(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…")
        return self._told() <= _LOGGED

    def message(self) -> str:
        """All of it in at most a few thousand characters."""
        others = {
            PublicationAction.WAITING: ("waits or is at work", "wait or are at work"),
            PublicationAction.KEPT: ("is kept for debugging", "are kept for debugging"),
            PublicationAction.UNKNOWN_RUN: (
                "belongs to no run of this Dagster",
                "belong to no run of this Dagster",
            ),
            PublicationAction.SET_ASIDE: (
                "is set aside (`branchlake set-aside`)",
                "are set aside (`branchlake set-aside`)",
            ),
        }
        counted = [f"{count} {agree(count, *others[one])}" for one in others if (count := self.counts[one])]
        more = self._told() - len(self.examples)
        told = [*self.examples, *([f"and {more} more, in the log"] if more else [])]
        rest = f"Of the other branches {', '.join(counted)}." if counted else ""
        if not told:
            return f"Nothing to publish. {rest}".rstrip()
        return " | ".join([*told, *([rest] if rest else [])])

    def row(self) -> str:
        """The same in a few words, for the tick's row in Dagster's list: it shows a tick's cursor there."""
        done = {action: count for action, count in self.counts.items() if action not in _COUNTED}
        return ", ".join(f"{action} {count}" for action, count in done.items()) or "nothing to publish"

    def _told(self) -> int:
        return sum(count for action, count in self.counts.items() if action not in _COUNTED)
