"""The quality gate, the publisher that commits a passing run to `main`, and their sensors and jobs."""
