"""Errors of requests to providers. Requests only read, so an error leaves no partial change."""

from __future__ import annotations

from branchlake_dagster import BranchlakeError, Terminal, Transient


class ProviderUnavailable(BranchlakeError, Transient):  # noqa: N818 - named like the other outcomes
    """The provider did not answer, answered incompletely or failed temporarily, in all attempts."""


class ProviderBusy(BranchlakeError, Transient):  # noqa: N818
    """A request now would exceed the provider's rate limit, so it was not sent."""


class ProviderRefused(BranchlakeError, Terminal):  # noqa: N818
    """The provider refused the query, or its answer is too large or has no catalog."""


class ProviderLoginFailed(BranchlakeError, Terminal):  # noqa: N818
    """The login at the provider failed: user or password are missing or not accepted."""
