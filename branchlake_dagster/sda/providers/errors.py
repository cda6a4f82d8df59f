"""What can go wrong with a provider. Only reads are made, so nothing is ever half done."""

from __future__ import annotations

from branchlake_dagster import BranchlakeError, Terminal, Transient


class ProviderUnavailable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """It did not answer, or not in full, or said that it cannot now; the retries are used up."""


class ProviderBusy(BranchlakeError, Transient):  # noqa: N818
    """Asking now would exceed what the provider allows in an hour; nothing was asked."""


class ProviderRefused(BranchlakeError, Terminal):  # noqa: N818
    """It answered that the query is wrong or not allowed, or sent no catalogue."""


class ProviderLoginFailed(BranchlakeError, Terminal):  # noqa: N818
    """It knows no such user and password."""
