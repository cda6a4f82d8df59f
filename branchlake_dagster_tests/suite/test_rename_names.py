"""The tool that renames names: `tools/rename_names.py`, on a package of two modules and their tests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

TOOL = Path(__file__).parents[2] / "tools" / "rename_names.py"

STOCK = '''"""What is in stock. `amount` adds; see shop.stock.Shelf.beyond."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Protocol

__all__ = ["LIMIT", "Shelf", "amount"]
LIMIT = 3


class Kind(Enum):
    OLD = "old"


class Counter(Protocol):
    def tally(self, floor: int) -> int: ...


@dataclass(frozen=True)
class Shelf:
    """A shelf.

    Args:
        told: what it has.
    """

    told: int
    rest: int = field(default=LIMIT)

    @property
    def beyond(self) -> int:
        """Not `told`."""
        return self.rest - self.told

    def tally(self, floor: int) -> int:
        """Counts from `floor` on."""
        return self.told - floor


class Wide(Shelf):
    def tally(self, floor: int) -> int:
        return super().tally(floor=floor) + 1


class Room:
    def __init__(self, shelf: Shelf) -> None:
        self._there = shelf

    def size(self) -> int:
        return self._there.told


def amount(there: Shelf, *, floor: int = 0) -> int:
    """Adds.

    Args:
        there: the shelf.
    """
    found = there.tally(floor=floor)

    def inner(one: int) -> int:
        return one + found

    return inner(found) + sum(found for found in [1, 2]) + (lambda x: x + found)(1)


def counted(counter: Counter) -> int:
    return counter.tally(floor=1)


later = partial(amount, floor=LIMIT)
'''

USES = """from __future__ import annotations

from dataclasses import replace

import shop.stock as stock
from shop.stock import Kind, Room, Shelf, Wide, amount
from shop.stock import amount as total


class Other:
    told = 1


def use(shelf: Shelf | Wide, untyped, other: Other) -> int:
    changed = replace(shelf, told=2)
    assert getattr(shelf, "told") and other.told and Kind.OLD.value == "old"
    match changed:
        case Shelf(told=told):
            print(f"{told} {changed.told!r} {shelf.beyond}")
    room = Room(shelf=Shelf(told=1, rest=stock.LIMIT))
    untyped.beyond, untyped.told
    return amount(there=changed) + total(there=shelf, floor=1) + stock.amount(shelf) + room.size()


def patch(monkeypatch) -> None:
    monkeypatch.setattr(stock, "LIMIT", 4)
    monkeypatch.setattr("shop.stock.LIMIT", 4)
"""

MAP = {
    "LIMIT": "MOST",
    "Kind.OLD": "FORMER",
    "Shelf.told": "item_count",
    "Shelf.beyond": "free_places",
    "Shelf.tally": "count_items",
    "Shelf.tally(floor)": "first_item",
    "Room(shelf)": "only_shelf",
    "Room._there": "_shelf",
    "amount": "total_amount",
    "amount(there)": "counted_shelf",
    "amount(floor)": "lowest",
    "amount.found": "items",
    "amount.inner": "add_items",
    "amount.inner(one)": "more",
    "amount.x": "number",
    "Wide": "WideShelf",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "stock.py").write_text(STOCK)
    (package / "uses.py").write_text(USES)
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n")
    (tmp_path / "README.md").write_text("`Shelf.beyond`, `amount()` and shop.stock.amount\n")
    return tmp_path


def rename(project: Path, names: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    (project / "map.json").write_text(json.dumps({"shop.stock": names}))
    command = [sys.executable, str(TOOL), "--root", str(project), "--package", "shop", *options]
    return subprocess.run(
        [*command, "--config", str(project / "mypy.ini"), str(project / "map.json")],
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_use_follows(project: Path) -> None:
    done = rename(project, MAP)
    assert done.returncode == 0, done.stdout + done.stderr
    stock, uses = ((project / "shop" / name).read_text() for name in ("stock.py", "uses.py"))
    expected = STOCK
    for old, new in [
        ("LIMIT", "MOST"),
        ("OLD", "FORMER"),
        ("told", "item_count"),
        ("beyond", "free_places"),
        ("tally", "count_items"),
        ("_there", "_shelf"),
        ("amount", "total_amount"),
        ("there:", "counted_shelf:"),
        ("there.", "counted_shelf."),
        ("inner", "add_items"),
        ("one", "more"),
        ("lambda x: x", "lambda number: number"),
        ("class Wide", "class WideShelf"),
        ("floor: int = 0", "lowest: int = 0"),
        ("floor=floor)\n\n    def", "floor=lowest)\n\n    def"),
        ("amount, floor", "amount, lowest"),
        ("self, shelf:", "self, only_shelf:"),
        ("= shelf\n", "= only_shelf\n"),
        ("found", "items"),
        ("floor", "first_item"),
    ]:
        whole = rf"(?<!\w){old}(?!\w)" if old.isidentifier() else re.escape(old)
        expected = re.sub(whole, new, expected)
    assert (
        stock.splitlines()
        == expected.replace("sum(items for items in", "sum(found for found in").splitlines()
    )
    for line in (
        "from shop.stock import Kind, Room, Shelf, WideShelf, total_amount",
        "from shop.stock import total_amount as total",
        "    told = 1",
        "    changed = replace(shelf, item_count=2)",
        '    assert getattr(shelf, "item_count") and other.told and Kind.FORMER.value == "old"',
        "        case Shelf(item_count=told):",
        '            print(f"{told} {changed.item_count!r} {shelf.free_places}")',
        "    room = Room(only_shelf=Shelf(item_count=1, rest=stock.MOST))",
        "    untyped.free_places, untyped.told",
        '    monkeypatch.setattr(stock, "MOST", 4)',
        '    monkeypatch.setattr("shop.stock.MOST", 4)',
    ):
        assert line in uses.splitlines()
    assert (
        "total_amount(counted_shelf=changed) + total(counted_shelf=shelf, lowest=1) + stock.total_amount"
        in uses
    )
    assert (
        (project / "README.md")
        .read_text()
        .startswith("`Shelf.free_places`, `amount()` and shop.stock.total_amount")
    )
    assert "shop/uses.py:21" in done.stdout, "the attribute of an object without a type is reported"
    assert "README.md:1" in done.stdout
    subprocess.run([sys.executable, "-c", "import shop.uses"], cwd=project, check=True)


@pytest.mark.parametrize(
    ("entry", "new"),
    [
        ("nothing", "anything"),
        ("amount", "counted"),
        ("amount", "sum"),
        ("amount.found", "there"),
        ("amount.found", "partial"),
        ("amount.inner(one)", "found"),
        ("Shelf.told", "rest"),
        ("amount(there)", "class"),
        ("Kind.name", "title"),
    ],
)
def test_nothing_is_written_when_a_name_is_taken_or_unknown(project: Path, entry: str, new: str) -> None:
    done = rename(project, {entry: new, "LIMIT": "MOST"})
    assert (done.returncode, done.stderr) == (1, "")
    assert "Conflicts" in done.stdout
    assert (project / "shop" / "stock.py").read_text() == STOCK


def test_a_check_writes_nothing(project: Path) -> None:
    done = rename(project, MAP, "--check")
    assert (done.returncode, done.stderr) == (0, "")
    assert "shop.stock: Shelf.told" in done.stdout
    assert (project / "shop" / "stock.py").read_text() == STOCK
