"""How often a service in trouble is asked: a budget of repeated calls, and a breaker (ADR 35)."""
