"""The commands of `branchlake backfill`. What they need is imported when one of them runs."""

from __future__ import annotations

import json
import time

import click

from branchlake_dagster.cli.command_settings import MODULE_HELP, command_settings


@click.group(name="backfill")
def backfill_group() -> None:
    """Recompute partitions and what depends on them.

    What is computed from them by changes follows, stage by stage.
    """


module = click.option("-m", "--module", help=MODULE_HELP)
chosen = click.option("--partition", "partitions", multiple=True, help="Its key; may be repeated.")
everything = click.option("--all", "everything", is_flag=True, help="All partitions, or all of it.")
as_json = click.option("--json", "as_json", is_flag=True, help="Machine-readable.")


@backfill_group.command(name="plan")
@click.argument("asset")
@module
@chosen
@everything
@as_json
def plan_command(
    asset: str, module: str | None, partitions: tuple[str, ...], everything: bool, as_json: bool
) -> None:
    """Show what a backfill would compute.

    Stage by stage, with its size and the reason. Launches nothing. Without --partition and --all:
    those that an older code version of ASSET has computed.
    """
    from branchlake_dagster.cli import backfill
    from branchlake_dagster.cli import backfill as shown

    with backfill.place(module) as where:
        what = backfill.asked(where, asset, partitions, everything=everything)
        found = backfill.stages(where, what) if what is not None else []
    if as_json:
        click.echo(json.dumps([shown.stage_dict(one) for one in found], indent=2))
    elif found:
        shown.show_plan(found)
    else:
        click.echo(f"Nothing of {asset} is stale.")


@backfill_group.command(name="run")
@click.argument("asset")
@module
@chosen
@everything
@click.option(
    "--approval", is_flag=True, help="Hold each stage back until the results before it are approved."
)
@as_json
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
    from branchlake_dagster.cli import backfill as shown

    with backfill.place(module) as where:
        what = backfill.asked(where, asset, partitions, everything=everything)
        number = backfill.run(where, what, time.time(), approval=approval) if what is not None else None
    if as_json:
        click.echo(json.dumps({"backfill": number}))
    elif number is None:
        click.echo(f"Nothing of {asset} is stale.")
    else:
        click.echo(
            f"Backfill {number}. Next: branchlake backfill status {number}{shown.module_option(module)}"
        )


@backfill_group.command(name="status")
@click.argument("backfill_id")
@module
@as_json
def status_command(backfill_id: str, module: str | None, as_json: bool) -> None:
    """Show the progress of each stage.

    With it the changes that wait for approval.
    """
    from branchlake_dagster.cli import backfill
    from branchlake_dagster.cli import backfill as compared
    from branchlake_dagster.cli import backfill as shown

    with backfill.place(module) as where:
        found = backfill.status(where, backfill_id)
        comparisons = backfill.compare_held(where, backfill_id, found)
    if as_json:
        by_asset = {one.asset: compared.comparison_dict(one)["total"] for one in comparisons}
        stages = [shown.progress_dict(one) | {"comparison": by_asset.get(one.stage.asset)} for one in found]
        click.echo(json.dumps(stages, indent=2))
    else:
        shown.show_status(found)
        for one in comparisons:
            asset = one.asset.to_user_string()
            click.echo(f"Stage {one.number}, {asset}, to be approved: {compared.total_text(one)}")


@backfill_group.command(name="compare")
@click.argument("backfill_id")
@click.argument("asset", required=False)
@module
@as_json
def compare_command(backfill_id: str, asset: str | None, module: str | None, as_json: bool) -> None:
    """Compare each stage with what it replaced.

    The rows on main now with those before the backfill; with ASSET only of that stage. Shows
    the rows, the sums of numeric columns and the share of changed rows, by partition and in total.
    """
    from branchlake_dagster.cli import backfill
    from branchlake_dagster.cli import backfill as compared

    with backfill.place(module) as where:
        found = backfill.compare(where, backfill_id, asset)
    if as_json:
        click.echo(json.dumps([compared.comparison_dict(one) for one in found], indent=2))
    else:
        compared.show_comparisons(found)


@backfill_group.command(name="approve")
@click.argument("backfill_id")
@click.argument("assets", nargs=-1)
@module
@as_json
def approve_command(backfill_id: str, assets: tuple[str, ...], module: str | None, as_json: bool) -> None:
    """Approve what a backfill has published.

    The stages after it are then launched; with ASSETS only those after these. What is published
    later waits for another approval.
    """
    from branchlake_dagster.cli import backfill as approval

    found = approval.approve_backfill(command_settings(module).settings, backfill_id, assets)
    if as_json:
        click.echo(json.dumps(approval.approval_dict(found), indent=2))
    else:
        click.echo(found.text())


@backfill_group.command(name="retry")
@click.argument("backfill_id")
@module
@click.option(
    "--rebuild-lost", is_flag=True, help="Also compute anew the stages whose change is no longer known."
)
@as_json
def retry_command(backfill_id: str, module: str | None, rebuild_lost: bool, as_json: bool) -> None:
    """Launch the failed partitions of each stage again.

    Dagster's daemon computes them. What follows from them launches itself as it is published.
    """
    from branchlake_dagster.cli import backfill
    from branchlake_dagster.cli import backfill as shown

    with backfill.place(module) as where:
        done = backfill.retry(where, backfill_id, time.time(), rebuild_lost=rebuild_lost)
    if as_json:
        click.echo(json.dumps(shown.retry_dict(done), indent=2))
    else:
        shown.show_retry(done, backfill_id, module)
