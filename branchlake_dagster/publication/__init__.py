"""The quality gate, the publisher that commits a passing run to `main`, and a code location's sensors."""
