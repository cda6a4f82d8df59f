"""Launching of runs, backfills and sensors through the GraphQL API of Dagster's UI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import requests

from branchlake_dagster.errors import BranchlakeError, Terminal

_LAUNCH = """
mutation Launch($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
    ... on RunConfigValidationInvalid { errors { message } }
  }
}
"""
_BACKFILL = """
mutation Backfill($params: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $params) {
    __typename
    ... on LaunchBackfillSuccess { backfillId }
    ... on PythonError { message }
  }
}
"""
_START = "mutation Start($params: SensorSelector!) { startSensor(sensorSelector: $params) { __typename } }"


class BenchFailed(BranchlakeError, Terminal):  # noqa: N818 - named like the other outcomes
    """A step of a benchmark failed, so there is nothing to time."""


def launch_run(url: str, module: str, job: str, *, tags: Mapping[str, str] | None = None) -> str:
    """Launch a run of a job and return its id. Raises BenchFailed if Dagster refuses it."""
    params = {
        "selector": {"repositoryLocationName": module, "repositoryName": "__repository__", "jobName": job},
        "runConfigData": {},
        "executionMetadata": {
            "tags": [{"key": key, "value": value} for key, value in (tags or {}).items()],
        },
    }
    result = _post_query(url, _LAUNCH, "launchRun", params)
    if result["__typename"] != "LaunchRunSuccess":
        raise BenchFailed(f"Job {job} could not be launched: {result}")
    return str(result["run"]["runId"])


def launch_backfill(url: str, key: Sequence[str], partitions: Sequence[str]) -> str:
    """Launch a backfill of an asset and return its id. Raises BenchFailed if Dagster refuses it."""
    params = {"assetSelection": [{"path": [*key]}], "partitionNames": [*partitions], "fromFailure": False}
    result = _post_query(url, _BACKFILL, "launchPartitionBackfill", params)
    if result["__typename"] != "LaunchBackfillSuccess":
        raise BenchFailed(f"The backfill of {'/'.join(key)} could not be launched: {result}")
    return str(result["backfillId"])


def start_sensor(url: str, module: str, name: str) -> None:
    """Start a sensor. Raises BenchFailed if Dagster refuses it."""
    params = {"repositoryLocationName": module, "repositoryName": "__repository__", "sensorName": name}
    result = _post_query(url, _START, "startSensor", params)
    if result["__typename"] != "Sensor":
        raise BenchFailed(f"Sensor {name} could not be started: {result}")


def _post_query(url: str, query: str, field: str, params: Mapping[str, Any]) -> dict[str, Any]:
    response = requests.post(
        f"{url}/graphql", json={"query": query, "variables": {"params": params}}, timeout=60
    ).json()
    result: dict[str, Any] = (response.get("data") or {}).get(field) or {"__typename": str(response)}
    return result
