"""The command group `branchlake` and its short commands.

Expected errors end a command with one message instead of a stack trace. `branchlake new` creates a Dagster
project from the template in this package.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import keyword
import os
import re
import select
import shlex
import signal
import sys
import sysconfig
import threading
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution, distributions
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
from pydantic import ValidationError

from branchlake_dagster.cli.command_settings import MODULE_HELP, load_command_settings
from branchlake_dagster.cli.registry import CommandGroup, exit_on_signals, print_progress
from branchlake_dagster.errors import BranchlakeError, ConfigurationError, format_first_line
from branchlake_dagster.extras import DISTRIBUTION
from branchlake_dagster.settings import Settings

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_NAME_PLACEHOLDER = "PROJECT"
"""The placeholder of the project's name in paths and files of the template."""
_REQUIREMENT_PLACEHOLDER = "BRANCHLAKE_REQUIREMENT"
_HOME_PLACEHOLDER = "PROJECT_DAGSTER_HOME"
_SUFFIX = ".template"
"""The suffix of the template's files, so that no tool treats them as modules of this package."""
_EXTRAS = "embedded,query,ui"


def create_project(target: Path, *, requirement: str | None = None) -> list[Path]:
    """Create a project in the folder `target`. Return the paths of the files from the template.

    Also creates Dagster's home, `.branchlake/dagster` in the project, with the `dagster.yaml` of
    `branchlake up`. So `dg dev` works without `branchlake up`.

    Args:
        target: A new or empty folder. Its name becomes the name of the project.
        requirement: The project's dependency on this package. If it is None, the installed package is used
            (see `format_requirement`).

    Raises:
        ConfigurationError: The folder is not empty, or its name is not a valid name of a Python package.
    """
    from branchlake_dagster.cli.dagster_home import prepare_home

    name = _find_package_name(Path(os.path.abspath(target)).name)  # noqa: PTH100 - `.` and `..` have no name
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(
            f"{target} already exists and is not an empty folder.",
            hint="Name a new or an empty folder.",
            reason="folder_exists",
            subject=str(target),
        )
    home = target.absolute() / ".branchlake" / "dagster"
    replacements = {
        _HOME_PLACEHOLDER: str(home),
        _REQUIREMENT_PLACEHOLDER: requirement or format_own_requirement(),
        _NAME_PLACEHOLDER: name,
    }
    root = Path(str(files("branchlake_dagster.cli") / "template"))
    project_paths = []
    for source in sorted(root.rglob(f"*{_SUFFIX}")):
        relative_path = str(source.relative_to(root)).removesuffix(_SUFFIX).replace(_NAME_PLACEHOLDER, name)
        path = target / relative_path
        path.parent.mkdir(parents=True, exist_ok=True)
        content = source.read_text(encoding="utf-8")
        for placeholder, value in replacements.items():
            content = content.replace(placeholder, value)
        path.write_text(content, encoding="utf-8")
        project_paths.append(path)
    home.mkdir(mode=0o700, parents=True)
    prepare_home(home)
    return project_paths


_PACKAGE_NAME = re.compile("[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?")
"""Names that Python can import and that pip accepts as the name of a project (PEP 508)."""


def _find_package_name(folder_name: str) -> str:
    """Return the name of the package for a project in a folder of this name.

    Raises ConfigurationError if it is not a valid name, or if the package would hide a module of Python or of
    an installed package, such as `test` or `dagster`.
    """
    name = re.sub(r"[-. ]", "_", folder_name)
    if _PACKAGE_NAME.fullmatch(name) is None or keyword.iskeyword(name):
        raise ConfigurationError(
            f"{folder_name!r} cannot name a Python package.",
            hint="Use the letters a to z, digits and _. Start with a letter, end with a letter or digit, and"
            " do not use a keyword of Python.",
            reason="package_name",
            subject=folder_name,
        )
    if _is_distribution(name):
        raise ConfigurationError(
            f"A package {name} is installed already, so pip would replace it with the project.",
            hint="Give the folder another name.",
            reason="package_name",
            subject=folder_name,
        )
    if name in sys.stdlib_module_names or _is_installed_module(name):
        raise ConfigurationError(
            f"A package {name} would hide the module {name}, which Python or an installed package provides.",
            hint="Give the folder another name.",
            reason="package_name",
            subject=folder_name,
        )
    return name


def _is_distribution(name: str) -> bool:
    """Return whether a distribution of this name is installed. Its modules may have other names.

    Editable installs, such as earlier projects, do not count. Upper and lower case, '-' and '_' are the same.
    """
    canonical_name = _canonicalize(name)
    return canonical_name == _canonicalize(DISTRIBUTION) or any(
        _canonicalize(package.metadata["Name"] or "") == canonical_name and not _is_editable(package)
        for package in distributions()
    )


def _canonicalize(name: str) -> str:
    """Return the name of a distribution as PEP 503 normalizes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_editable(package: Distribution) -> bool:
    """Return whether the distribution is a clone that was installed with `pip install --editable`."""
    try:
        direct_url = json.loads(package.read_text("direct_url.json") or "{}")
    except ValueError:
        return False
    return bool(direct_url.get("dir_info", {}).get("editable", False))


def _is_installed_module(name: str) -> bool:
    """Return whether Python's own folders or site-packages have a module of this name.

    Editable installs, such as earlier projects, do not count.
    """
    spec = importlib.util.find_spec(name)
    if spec is None:
        return False
    locations = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else ())]
    folders = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return name == DISTRIBUTION or any(
        str(Path(location).parent).startswith(folder) for location in locations for folder in folders
    )


def format_own_requirement() -> str:
    """Format a dependency on this package as it is installed here, for `pyproject.toml`."""
    package = distribution(DISTRIBUTION)
    return format_requirement(package.read_text("direct_url.json"), package.version)


def format_requirement(direct_url: str | None, version: str) -> str:
    """Format a dependency on this package for `pyproject.toml`, which pip can resolve on this machine.

    `direct_url` is the content of pip's `direct_url.json` (PEP 610) if the package was installed from a
    clone or a wheel. It is None if the package came from an index, so that its version is enough.
    """
    if direct_url is None:
        return f"{DISTRIBUTION}[{_EXTRAS}]>={version}"
    origin = json.loads(direct_url)
    vcs = origin.get("vcs_info")
    url = f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}" if vcs else origin["url"]
    return f"{DISTRIBUTION}[{_EXTRAS}] @ {url}"


class _Commands(CommandGroup):
    """Turns expected errors into a message and exit code 1, and Ctrl-C into exit code 130.

    SIGTERM and SIGHUP end a command like Ctrl-C, with exit code 143 and 129.

    If the reader of the output has ended (`branchlake sql … | head`), the command ends without a message,
    with exit code 141 like a Unix tool.

    Expected errors are those of branchlake, of the operating system, of Dagster and its database, and
    invalid settings. A standard stream that the caller has closed is empty.
    """

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run the group in a process of its own, which Ctrl-C may end at once after the command."""
        try:
            return super().__call__(*arguments, **options)
        finally:
            is_own_process = options.get("standalone_mode", True)
            if is_own_process and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_DFL)

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run the group as `click.Group.main`."""
        _replace_closed_streams()
        return super().main(*arguments, **options)

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        """Parse the arguments as `click.Group.make_context`. Prints the help or the version, if asked."""
        with _end_cleanly():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _end_cleanly(), exit_on_signals():
            return super().invoke(ctx)


@contextlib.contextmanager
def _end_cleanly() -> Iterator[None]:
    """Turn expected errors in the block, interrupts and closed outputs into exceptions of click.

    Also writes what standard output has in its buffer. At Python's exit it would be too late for a message.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print_progress("Interrupted.")
        raise click.exceptions.Exit(128 + signal.SIGINT) from None
    except (BrokenPipeError, SystemExit) as error:
        # Rich ends the process with exit code 1 if its output is a closed pipe.
        if isinstance(error, SystemExit):
            if error.code != 1 or not isinstance(error.__context__, BrokenPipeError):
                raise
        elif _has_reader(sys.stdout) and _has_reader(sys.stderr):  # another pipe, or a connection
            raise click.ClickException(f"A process or a server closed its connection: {error}.") from error
        _discard_output()
        raise click.exceptions.Exit(128 + signal.SIGPIPE) from None
    except BranchlakeError as error:
        raise click.ClickException(str(error)) from error
    except ValidationError as error:
        problems = "; ".join(map(_format_invalid_setting, error.errors()))
        raise click.ClickException(f"A setting is invalid: {problems.rstrip('.')}.") from error
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        message = _format_expected_error(error)
        if message is None:
            raise
        raise click.ClickException(message) from error


def _replace_closed_streams() -> None:
    """Replace standard streams that the caller has closed, which are None, by the null device."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - stays open


def _has_reader(stream: TextIO) -> bool:
    """Return False if the stream is a pipe whose reader has ended."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        return not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):  # a replaced stream has no file descriptor
        return True


def _discard_output() -> None:
    """Send what standard output still has in its buffer to the null device. Python flushes it at exit."""
    with contextlib.suppress(OSError, ValueError):  # a replaced stream has no file descriptor
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, sys.stdout.fileno())
        os.close(null_device)


def _format_invalid_setting(error: ErrorDetails) -> str:
    """Format an error of pydantic: the variable, unless several settings contradict each other, and why."""
    reason = error["msg"].removeprefix("Value error, ")
    variable = ".".join(map(str, error["loc"])).upper()
    return f"BRANCHLAKE_{variable}: {reason}" if variable else reason


def _format_expected_error(error: Exception) -> str | None:
    """Return one line about an error of the operating system, of Dagster, or of its database.

    Return None for other errors.
    """
    if isinstance(error, OSError):
        if error.errno == errno.ENOSPC:
            return f"The disk is full: {error}. Free some space and run the command again."
        if error.filename is None:
            return f"{format_first_line(error)}. Repeat the command when the cause is mended."
        return f"{error.filename}: {error.strerror}. Check that it exists, and that you may read or write it."
    if _is_loaded_class(error, "dagster", "DagsterError"):
        return (
            f"Dagster: {format_first_line(error)}. Check the code location, and dagster.yaml in DAGSTER_HOME."
        )
    if _is_loaded_class(error, "sqlalchemy.exc", "SQLAlchemyError"):
        return (
            f"Dagster's database: {format_first_line(error)}. Check that it runs, and the storage in"
            " dagster.yaml in DAGSTER_HOME."
        )
    return None


def _is_loaded_class(error: Exception, module: str, name: str) -> bool:
    """Return whether the error is of a class whose module this process has imported.

    Importing Dagster takes a second, which a command without it need not wait.
    """
    error_class = getattr(sys.modules.get(module), name, None)
    return error_class is not None and isinstance(error, error_class)


_module_option = click.option("-m", "--module", help=MODULE_HELP)


_SENSORS = "branchlake_dagster.sda.commands.sensors"
_CONJUNCTIONS = "branchlake_dagster.sda.commands.conjunctions"


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    sources={
        "backup": "branchlake_dagster.cli.backup:backup",
        "backfill": "branchlake_dagster.cli.backfill_commands:backfill_group",
        "bench": "branchlake_dagster.bench.commands:bench",
        "columns": "branchlake_dagster.cli.column_commands:columns",
        "demo": "branchlake_dagster.sda.commands.demo:demo",
        "reprocess": "branchlake_dagster.cli.reprocess:reprocess",
        "maintain": "branchlake_dagster.cli.maintain:maintain",
        "restore": "branchlake_dagster.cli.backup:restore",
        "sda": "branchlake_dagster.sda.commands.group:sda",
        "sql": "branchlake_dagster.cli.sql:sql",
        "undo": "branchlake_dagster.cli.undo:undo",
        "undrop": "branchlake_dagster.cli.undo:undrop",
        "conjunctions": f"{_CONJUNCTIONS}:conjunctions",
        "screen-ephemeris": f"{_CONJUNCTIONS}:screen_ephemeris",
        "receive": f"{_SENSORS}:receive",
        "simulate": f"{_SENSORS}:simulate",
    },
    former_names=("conjunctions", "screen-ephemeris", "receive", "simulate"),
)
@click.version_option(package_name="branchlake_dagster")
def main() -> None:
    """Run Dagster assets on their own branches of an Iceberg lake."""


@main.command()
@click.option(
    "--to", type=click.Path(file_okay=False), help="Also copy them to this folder, with those for S3."
)
@click.option("--prepare", is_flag=True, help="Start the servers once, so that later starts are faster.")
def fetch(to: str | None, prepare: bool) -> None:
    """Download the jars of the embedded servers."""
    from branchlake_dagster.embedded.jars import copy_jars
    from branchlake_dagster.embedded.servers import EmbeddedServers

    jars = EmbeddedServers(Settings(), notify=print_progress).fetch_jars(s3=to is not None)
    if to is not None:
        for path in copy_jars(jars, Path(to)):
            click.echo(path)
    if prepare:
        from branchlake_dagster.cli.server_starts import prepare_starts

        try:
            prepare_starts(Settings(), say=print_progress)
        except (OSError, BranchlakeError) as error:
            print_progress(f"Later starts will not be faster, because preparing them failed: {error}")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
def new(folder: Path) -> None:
    """Create a Dagster project in FOLDER.

    Its example asset is written to a branch, checked, and published if the check passes.
    """
    for path in create_project(folder):
        click.echo(path)
    print_progress(
        f"Next: cd {shlex.quote(str(folder))}; in a virtual environment pip install -e '.[dev]';"
        " dg check defs; pytest; dg dev."
    )


@main.command()
@_module_option
@click.option("--with", "also", type=click.Choice(["kafka"]), multiple=True, help="Also start this server.")
def up(module: str | None, also: tuple[str, ...]) -> None:
    """Start the embedded servers.

    Servers that already run are not changed. Also prepares DAGSTER_HOME and prints it.
    """
    from branchlake_dagster.cli.dagster_home import dagster_home
    from branchlake_dagster.lakehouse.lakehouse import Lakehouse, nessie_page_url, rest_catalog_url

    settings = load_command_settings(module).settings
    home = dagster_home(settings)
    try:
        endpoints = Lakehouse(settings, say=print_progress).endpoints()
    except KeyboardInterrupt:
        print_progress("Servers that were already started go on. To stop them: branchlake down")
        raise
    click.echo(f"Nessie   {endpoints.nessie_uri}")
    click.echo(f"Page     {nessie_page_url(endpoints, settings)}")
    if rest := rest_catalog_url(endpoints, settings):
        click.echo(f"REST     {rest}")
    click.echo(f"Spark    {endpoints.spark_remote or 'classic sessions'}")
    click.echo(f"Lake     {settings.warehouse_uri}")
    click.echo(f"Dagster  DAGSTER_HOME={home}")
    if "kafka" in also:
        from branchlake_dagster.ingest.embedded_kafka import EmbeddedKafka

        kafka = EmbeddedKafka(settings, say=print_progress)
        click.echo(f"Kafka    {kafka.up()}")
        if kafka.requires_password:
            click.echo(f"         its clients' login: {kafka.client_properties}")


@main.command()
@_module_option
def down(module: str | None) -> None:
    """Stop the embedded servers; data is kept."""
    from branchlake_dagster.cli.run_branches import find_daemon_warning
    from branchlake_dagster.embedded.servers import EmbeddedServers
    from branchlake_dagster.ingest.embedded_kafka import EmbeddedKafka

    settings = load_command_settings(module).settings
    try:
        warning = find_daemon_warning(settings)
    except Exception as error:  # noqa: BLE001 - YAML, SQLite and Dagster raise many classes
        warning = (
            f"Dagster's home cannot be read ({type(error).__name__}), so it is unknown whether a Dagster"
            " daemon uses this lake. Such a daemon starts the servers again."
        )
    if warning:
        print_progress(warning)
    server_names = (
        *EmbeddedServers(settings, notify=print_progress).stop_all(),
        *(("kafka",) if EmbeddedKafka(settings).down() else ()),
    )
    click.echo(f"Stopped {' and '.join(server_names)}." if server_names else "Nothing was running.")


@main.command()
@_module_option
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def status(module: str | None, as_json: bool) -> None:
    """Show servers, run branches and publications.

    Each run branch is shown with its run, the run's state and its age. Starts nothing.
    """
    from branchlake_dagster.cli.run_branches import gather_status, show_status

    loaded_settings = load_command_settings(module)
    report = gather_status(loaded_settings.settings, loaded_settings.description)
    click.echo(json.dumps(report, indent=2)) if as_json else show_status(report)


@main.command()
@click.argument("asset", required=False)
@click.option("--partitions", is_flag=True, help="List the partitions with unconsumed changes, and why.")
@_module_option
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def consumers(asset: str | None, partitions: bool, module: str | None, as_json: bool) -> None:
    """Show the unconsumed changes of incremental tables.

    Rows are counted from file metadata: a file that was rewritten for one deleted row counts all its rows,
    before and after. Such a number is shown as "at most".

    With ASSET, or with --partitions for all assets, lists each partition with unconsumed changes, its
    position, and why no run is launched for it.
    """
    if asset is None and not partitions:
        from branchlake_dagster.cli.consumers import gather_consumers, show_consumers

        report = gather_consumers(load_command_settings(module).settings)
        click.echo(json.dumps(report, indent=2)) if as_json else show_consumers(report)
        return
    from datetime import UTC, datetime

    from branchlake_dagster.cli.backfill import open_location
    from branchlake_dagster.cli.consumers import (
        gather_partitions,
        partitions_to_dicts,
        show_consumer_partitions,
    )

    now = datetime.now(UTC)
    with open_location(module) as context:
        consumer_partitions = gather_partitions(context, asset, now)
    click.echo(
        json.dumps(partitions_to_dicts(consumer_partitions, now), indent=2)
    ) if as_json else show_consumer_partitions(consumer_partitions, now)


@main.command()
@_module_option
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def doctor(module: str | None, as_json: bool) -> None:
    """Check addresses, versions and permissions.

    Shows a remedy for each wrong finding. Starts nothing. The exit code is 1 if a finding is wrong.
    """
    from branchlake_dagster.cli.doctor import examination_to_dict, examine_setup, show_examination

    loaded_settings = load_command_settings(module)
    examination = examine_setup(loaded_settings.settings, loaded_settings.source, loaded_settings.trouble)
    click.echo(json.dumps(examination_to_dict(examination), indent=2)) if as_json else show_examination(
        examination
    )
    sys.exit(0 if examination.healthy else 1)


@main.command()
@_module_option
@click.option("--dry-run", is_flag=True, help="Only show what would be done, and why.")
@click.option(
    "--branch",
    "names",
    multiple=True,
    help="Discard this branch, or delete this discarded- tag with its files, even if another Dagster instance"
    " created it.",
)
def reap(module: str | None, dry_run: bool, names: tuple[str, ...]) -> None:
    """Discard run branches that nobody will publish.

    Deletes the files of branches that were discarded long ago. Shows the reason for each branch.

    A branch is kept as long as the settings of its run's code location require. The settings of this command
    apply to branches that you name, and to runs of older versions, which did not record their settings.

    If a writer is silent, waits for half a minute to find out whether it is dead. --dry-run does not wait.
    """
    from branchlake_dagster.cleanup.jobs import end_named_refs, reap_branches, sweep_discarded
    from branchlake_dagster.cli.dagster_home import open_instance
    from branchlake_dagster.cli.location import format_settings
    from branchlake_dagster.cli.run_branches import show_reaping
    from branchlake_dagster.lakehouse.lakehouse import Lakehouse

    loaded_settings = load_command_settings(module)
    settings = loaded_settings.settings if dry_run else loaded_settings.require_named_lake()
    lake = Lakehouse(settings, say=print_progress, start=False)
    lake.endpoints(spark=False)
    with open_instance(settings, read_only=dry_run) as instance:
        if names:
            reapings, sweepings = end_named_refs(lake, instance, names, dry_run=dry_run)
        else:
            reapings = list(reap_branches(lake, instance, dry_run=dry_run))
            sweepings = list(sweep_discarded(lake, instance, dry_run=dry_run))
    setting_names = ("keep_failed_hours", "discard_grace_h", "orphan_max_age_h")
    formatted_settings = format_settings(settings, setting_names, loaded_settings.source)
    print_progress(
        f"Settings for {'these branches' if names else 'runs that did not record their own'}:"
        f" {formatted_settings}."
    )
    show_reaping(reapings, sweepings, dry_run=dry_run)


@main.group(name="set-aside", invoke_without_command=True)
@_module_option
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.pass_context
def set_aside(ctx: click.Context, module: str | None, as_json: bool) -> None:
    """List runs that could not be judged or published.

    A run is set aside after several attempts. Shows the reason for each run and the next commands.
    """
    ctx.obj = module
    if ctx.invoked_subcommand is None:
        from branchlake_dagster.cli.run_branches import gather_parked_runs, show_parked_runs

        runs = gather_parked_runs(load_command_settings(module).settings)
        click.echo(json.dumps(runs, indent=2)) if as_json else show_parked_runs(runs)


@set_aside.command()
@click.argument("run_id")
@click.pass_obj
def retry(module: str | None, run_id: str) -> None:
    """Let the publication sensor try the run again."""
    from branchlake_dagster.cli.run_branches import retry_run

    click.echo(retry_run(load_command_settings(module).require_named_lake(), run_id))


@set_aside.command()
@click.argument("run_id")
@click.pass_obj
def end(module: str | None, run_id: str) -> None:
    """Discard the run's branch and publish nothing."""
    from branchlake_dagster.cli.run_branches import end_run

    click.echo(end_run(load_command_settings(module).require_named_lake(), run_id))
