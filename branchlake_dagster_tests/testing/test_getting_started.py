"""README.md and docs/getting-started.md, step by step as their reader does them."""

import re
from pathlib import Path

from click.testing import CliRunner

from branchlake_dagster.cli import main
from branchlake_dagster.testing import ThrowawayLake
from branchlake_dagster_tests.testing.documented import GETTING_STARTED, README, load_file


def test_the_example_of_the_readme(lake: ThrowawayLake, tmp_path: Path) -> None:
    shop = load_file("my_lake.py", tmp_path, README)
    assert lake.publish(lake.run(shop.defs, select="shop/prices")).published
    assert lake.polars("shop.prices").height == 2
    shop = load_file("my_lake.py", tmp_path, README, edit=("0.1]", "-0.1]"))
    outcome = lake.publish(lake.run(shop.defs, select="shop/prices"))
    assert outcome.status == "blocked"
    assert str(outcome.reasons[0]) in README.read_text()
    assert lake.polars("shop.prices").height == 2


def test_a_good_day_a_bad_day_its_correction_and_a_backfill(lake: ThrowawayLake, tmp_path: Path) -> None:
    shop = load_file("my_lake.py", tmp_path, GETTING_STARTED)
    page = GETTING_STARTED.read_text()

    def materialize(day: str) -> tuple[str, tuple[str, ...], str]:
        run = lake.run(shop.defs, select="shop/prices", partition=day)
        outcome = lake.publish(run)
        return outcome.status, outcome.reasons, run.run_id

    assert materialize("2026-11-01")[0] == "published"
    shop.WRONG_DAYS["2026-11-02"] = -0.1
    status, reasons, run_id = materialize("2026-11-02")
    assert status == "blocked"
    assert f"Not published: {reasons[0]}." in re.sub(r"\s*\n> ", " ", page)
    assert lake.polars("shop.prices").height == 2
    (command,) = re.findall(r'^\$ branchlake (sql) "(.+)" --run', page, re.MULTILINE)
    environment = {
        "BRANCHLAKE_STATE_DIR": str(lake.lakehouse.settings.state_dir),
        "BRANCHLAKE_NESSIE_URI": lake.lakehouse.nessie.uri,
    }
    arguments = [*command, "--run", run_id[:8], "--format", "csv"]
    shown = CliRunner().invoke(main, arguments, env=environment)
    assert shown.exit_code == 0, shown.output
    assert [line.split(",")[1:] for line in shown.stdout.splitlines()[1:]] == [['"nut"', "-0.1"]]
    shop.WRONG_DAYS.clear()
    assert materialize("2026-11-02")[0] == "published"
    shop.WRONG_DAYS["2026-11-05"] = -0.1
    days = [f"2026-11-0{day}" for day in range(1, 8)]
    assert [day for day in days if materialize(day)[0] == "blocked"] == ["2026-11-05"]
    assert lake.polars("shop.prices").height == 2 * 6
