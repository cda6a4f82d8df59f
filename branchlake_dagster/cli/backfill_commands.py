"""The commands of `branchlake backfill`. A command imports its dependencies when it runs."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from branchlake_dagster.cli.command_settings import MODULE_HELP, load_command_settings

if TYPE_CHECKING:
    from branchlake_dagster.cli.backfill import BackfillRequest


@click.group(name="backfill")
def backfill_group() -> None:
    """Recompute partitions and what depends on them.

    Assets that consume their changes follow, stage by stage.
    """


module_option = click.option("-m", "--module", help=MODULE_HELP)
partition_option = click.option(
    "--partition", "partitions", multiple=True, help="A partition key; may be repeated."
)
all_option = click.option("--all", "everything", is_flag=True, help="All partitions, or the whole asset.")
json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable.")


def _report_unknown(request: BackfillRequest | None) -> None:
    from branchlake_dagster.cli.backfill import format_unknown_partitions

    message = format_unknown_partitions(request) if request is not None else None
    if message is not None:
        click.echo(message, err=True)


@backfill_group.command(name="plan")
@click.argument("asset")
@module_option
@partition_option
@all_option
@json_option
def plan_command(
    asset: str, module: str | None, partitions: tuple[str, ...], everything: bool, as_json: bool
) -> None:
    """Show what a backfill would compute.

    Lists each stage with its size and reason. Launches nothing. Without --partition and --all, the
    backfill computes the partitions that an older code version of ASSET computed.
    """
    from branchlake_dagster.cli import backfill

    with backfill.open_location(module) as context:
        request = backfill.build_request(context, asset, partitions, everything=everything)
        stages = (
            backfill.plan_request(context, request) if request is not None and not request.is_empty else []
        )
    _report_unknown(request)
    if as_json:
        click.echo(json.dumps([backfill.stage_to_dict(stage) for stage in stages], indent=2))
    elif stages:
        backfill.show_plan(stages)
    elif request is None:
        click.echo(f"No data of {asset} comes from an older code version.")


@backfill_group.command(name="run")
@click.argument("asset")
@module_option
@partition_option
@all_option
@click.option(
    "--approval", is_flag=True, help="Hold each stage until the results of the stage before it are approved."
)
@json_option
def run_command(
    asset: str,
    module: str | None,
    partitions: tuple[str, ...],
    everything: bool,
    approval: bool,
    as_json: bool,
) -> None:
    """Launch the first stage of a backfill.

    Dagster's daemon computes it. Each later stage is launched by the incremental sensor once the one
    before it is published.
    """
    from branchlake_dagster.cli import backfill

    with backfill.open_location(module) as context:
        request = backfill.build_request(context, asset, partitions, everything=everything)
        backfill_id = (
            backfill.launch_request(context, request, time.time(), approval=approval)
            if request is not None and not request.is_empty
            else None
        )
    _report_unknown(request)
    if as_json:
        click.echo(json.dumps({"backfill": backfill_id}))
    elif request is None:
        click.echo(f"No data of {asset} comes from an older code version.")
    elif backfill_id is None:
        click.echo("Nothing was launched.")
    else:
        click.echo(
            f"Backfill {backfill_id}. Next: branchlake backfill status"
            f" {backfill_id}{backfill.format_module_option(module)}"
        )


@backfill_group.command(name="status")
@click.argument("backfill_id")
@module_option
@json_option
def status_command(backfill_id: str, module: str | None, as_json: bool) -> None:
    """Show the progress of each stage.

    Also show the changes that wait for approval.
    """
    from branchlake_dagster.cli import backfill

    with backfill.open_location(module) as context:
        stage_progress = backfill.report_stage_progress(context, backfill_id)
        comparisons = backfill.compare_held_stages(context, backfill_id, stage_progress)
    if as_json:
        totals = {
            comparison.asset: backfill.comparison_to_dict(comparison)["total"] for comparison in comparisons
        }
        stages = [
            backfill.progress_to_dict(entry) | {"comparison": totals.get(entry.stage.asset)}
            for entry in stage_progress
        ]
        click.echo(json.dumps(stages, indent=2))
    else:
        backfill.show_status(stage_progress)
        for comparison in comparisons:
            asset = comparison.asset.to_user_string()
            click.echo(
                f"Stage {comparison.number}, {asset}, waits for approval: {backfill.format_total(comparison)}"
            )


@backfill_group.command(name="compare")
@click.argument("backfill_id")
@click.argument("asset", required=False)
@module_option
@json_option
def compare_command(backfill_id: str, asset: str | None, module: str | None, as_json: bool) -> None:
    """Compare each stage with the rows that it replaced.

    Compares the rows on main with those before the backfill; with ASSET, only for that stage. Shows
    the rows, the sums of numeric columns and the share of changed rows, by partition and in total.
    """
    from branchlake_dagster.cli import backfill

    with backfill.open_location(module) as context:
        comparisons = backfill.compare_backfill(context, backfill_id, asset)
    if as_json:
        click.echo(
            json.dumps([backfill.comparison_to_dict(comparison) for comparison in comparisons], indent=2)
        )
    else:
        backfill.show_comparisons(comparisons)


@backfill_group.command(name="approve")
@click.argument("backfill_id")
@click.argument("assets", nargs=-1)
@module_option
@json_option
def approve_command(backfill_id: str, assets: tuple[str, ...], module: str | None, as_json: bool) -> None:
    """Approve the published results of a backfill.

    The next stages are then launched. With ASSETS, only the results of these assets are approved.
    Results that are published later wait for another approval.
    """
    from branchlake_dagster.cli import backfill

    settings = load_command_settings(module).require_named_lake()
    approval = backfill.approve_assets(settings, backfill_id, assets)
    if as_json:
        click.echo(json.dumps(backfill.approval_to_dict(approval), indent=2))
    else:
        click.echo(approval.format_summary())


@backfill_group.command(name="retry")
@click.argument("backfill_id")
@module_option
@click.option(
    "--rebuild-lost", is_flag=True, help="Also recompute the stages whose changes are no longer known."
)
@json_option
def retry_command(backfill_id: str, module: str | None, rebuild_lost: bool, as_json: bool) -> None:
    """Launch the failed partitions of each stage again.

    Dagster's daemon computes them. Later stages launch themselves when these results are published.
    """
    from branchlake_dagster.cli import backfill

    with backfill.open_location(module) as context:
        retry_plan = backfill.retry_backfill(context, backfill_id, time.time(), rebuild_lost=rebuild_lost)
    if as_json:
        click.echo(json.dumps(backfill.retry_to_dict(retry_plan), indent=2))
    else:
        backfill.show_retry(retry_plan, backfill_id, module)
