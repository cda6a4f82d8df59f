"""Declarations on the same rows of an asset, put into one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import dagster as dg

from branchlake_dagster.checks.asset_checks.step import check_step, declared_in
from branchlake_dagster.checks.constraints.model import ContractError


@dataclass
class _Group:
    key: dg.AssetKey | None = None
    partitions: dg.PartitionsDefinition[str] | None = None
    members: list[dg.AssetChecksDefinition] = field(default_factory=list)


def join_checks(checks: Iterable[dg.AssetChecksDefinition]) -> list[dg.AssetChecksDefinition]:
    """Put the contracts and SQL checks of each asset into one step: opened once, counted in one Spark job.

    Each check keeps its name, severity, scope and verdict: it can be run alone, and one that fails or cannot
    be evaluated leaves the others theirs. Joined are checks of `pandera_checks` and `sql_check` on the same
    asset and the same rows (those of the run's partitions, or the whole table); others stay as they are.

    Args:
        checks (Iterable[AssetChecksDefinition]): Checks of any kind, on any assets.

    Returns:
        List[AssetChecksDefinition]: The same checks in fewer steps, for `Definitions(asset_checks=…)`.

    Raises:
        ContractError: Two checks on the same rows have one name.

    Examples:
        .. code-block:: python

            import dagster as dg

            from branchlake_dagster import join_checks, pandera_checks, sql_check

            defs = dg.Definitions(
                assets=[prices],
                asset_checks=join_checks(
                    [
                        pandera_checks(prices, Prices),
                        sql_check(prices, "known_shops", "SELECT * FROM {this} WHERE shop IS NULL"),
                    ]
                ),
            )
    """
    groups: list[_Group] = []
    for one in checks:
        if not declared_in(one):
            groups.append(_Group(members=[one]))
            continue
        spec = next(iter(one.check_specs))
        key, partitions = spec.asset_key, spec.partitions_def
        like = (group for group in groups if group.key == key and group.partitions == partitions)
        group = next(like, None)
        if group is None:
            groups.append(group := _Group(key, partitions))
        group.members.append(one)
    return [_joined(group) for group in groups]


def _joined(group: _Group) -> dg.AssetChecksDefinition:
    first = group.members[0]
    if len(group.members) == 1 or group.key is None:
        return first
    specs = [spec for one in group.members for spec in one.check_specs]
    twice = sorted(name for name, times in Counter(spec.name for spec in specs).items() if times > 1)
    if twice:
        raise ContractError(
            f"Asset {group.key.to_user_string()} has two checks called {', '.join(twice)}.",
            hint="Name them apart; a second contract takes name_prefix.",
            reason="same_name",
            subject=", ".join(twice),
        )
    whole = "" if group.partitions is not None else "table_"
    declared = [part for one in group.members for part in declared_in(one)]
    named = ", ".join(part.what for part in declared)
    return check_step(
        f"{group.key.to_python_identifier()}__{whole}checks",
        group.key,
        specs,
        declared,
        description=f"{named} on {group.key.to_user_string()}, in one Spark job.",
        kind="spark",
    )
