"""A run that repeats checks for the publisher: it reads one prepared state and writes nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping

from branchlake_dagster.branching.branch.reference_names import PUBLICATION_PREFIX, is_ours
from branchlake_dagster.branching.branch.run_tags import CHECK_HASH_TAG, CHECK_REF_TAG
from branchlake_dagster.branching.errors import InvalidCheckRun

_HASH = re.compile(r"[0-9a-f]{16,64}")


def checked_reference(run_id: str, tags: Mapping[str, str]) -> str | None:
    """The reference `name@hash` that a check run reads; None for every other run.

    The tags come from whoever launched the run. Only a publication branch is accepted, pinned at a hash: a
    catalog or Spark session at a fixed hash is read-only. A tag that named `main` once made a run write there
    without any check.

    Raises:
        InvalidCheckRun: The tags name another reference, or no hash.
    """
    if CHECK_REF_TAG not in tags:
        return None
    branch, hash_ = tags[CHECK_REF_TAG], tags.get(CHECK_HASH_TAG, "")
    if not is_ours(branch, PUBLICATION_PREFIX) or not _HASH.fullmatch(hash_):
        raise InvalidCheckRun(
            f"The run's tags make it a check run, but {branch}@{hash_} is not a prepared publication state.",
            branch=branch,
            run_id=run_id,
            hint=f"Remove the tags {CHECK_REF_TAG} and {CHECK_HASH_TAG}, and launch the run again.",
        )
    return f"{branch}@{hash_}"
