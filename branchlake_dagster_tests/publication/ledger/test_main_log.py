"""What `main`'s log says of a branch, however far back its base is, and how little of it is read for that."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from branchlake_dagster.nessie import NessieClient
from branchlake_dagster.nessie.model import ContentKey, Namespace, Put
from branchlake_dagster.publication.ledger import (
    BaseNotOnMain,
    MainLog,
    Publication,
    Published,
    publication_properties,
)
from branchlake_dagster.publication.stored_log import LogFile, StoredCommit
from branchlake_dagster_tests.simulation.history import Pointer
from branchlake_dagster_tests.simulation.nessie import InMemoryNessie
from branchlake_dagster_tests.simulation.transport import DirectTransport
from branchlake_dagster_tests.suite.raised import raising


@dataclass
class Main:
    """An in-memory `main` that counts how many pages of its log were read."""

    server: InMemoryNessie = field(default_factory=InMemoryNessie)
    pages: int = 0

    def __post_init__(self) -> None:
        answer = self.server.answer

        def counted(method: str, path: str, params: Mapping[str, str], body: Any) -> Any:
            self.pages += path.endswith("/history") and method == "GET"
            return answer(method, path, params, body)

        self.server.answer = counted
        self.client = NessieClient("", transport=DirectTransport(self.server))
        self.commit()

    @property
    def head(self) -> str:
        return self.client.reference("main").hash

    def commit(self, *branches: str, to: str = "main") -> str:
        """A commit; one of a publication of `branches`."""
        entries = [Publication(name, name, name, "passed", "", ()) for name in branches]
        key = ContentKey([f"n{uuid.uuid4().hex}"])
        return self.client.commit(
            to,
            expected_hash=self.client.reference(to).hash,
            operations=[Put(key, Namespace(None, key.elements))],
            message="some commit",
            properties=publication_properties(entries) if entries else {},
        ).hash

    def merge(self, branch: str) -> tuple[str, str]:
        """Somebody merges a branch of one commit; the branch's head and the commit on `main`."""
        base = self.head
        self.client.create_branch(branch, from_ref="main", from_hash=base)
        head = self.commit(to=branch)
        done = self.client.merge(
            from_name=branch, from_hash=head, into="main", expected_hash=base, message="by hand"
        )
        return head, done.target_hash

    def assign(self, at: str) -> None:
        """Roll `main` back, as Nessie's own tools can."""
        self.server.history.references["main"] = Pointer("BRANCH", at)


def test_a_publication_is_found_from_its_base_on() -> None:
    main, log = Main(), MainLog()
    base = main.head
    one = main.commit("run-a", "run-b")
    later = main.commit()
    for name in ("run-a", "run-b"):
        assert log.find_publication(main.client, name, base_hash=base, main_hash=main.head) == Published(
            one, is_new=False
        )
    assert log.find_publication(main.client, "run-c", base_hash=base, main_hash=main.head) is None
    assert log.find_publication(main.client, "run-a", base_hash=base, main_hash=base) is None
    assert (
        log.find_publication(main.client, "run-a", base_hash=one, main_hash=later) is None
    )  # its base is younger


def test_a_merge_outside_branchlake_is_found_by_the_hash_it_took() -> None:
    main, log = Main(), MainLog()
    base = main.head
    head, done = main.merge("run-x")
    main.commit("run-y")
    found = log.find_publication(main.client, "run-x", base_hash=base, main_hash=main.head, head_hash=head)
    assert found == Published(done, is_new=False, merged_outside=True)
    assert log.find_publication(main.client, "run-x", base_hash=base, main_hash=main.head) is None
    assert (
        log.find_publication(main.client, "run-x", base_hash=base, main_hash=main.head, head_hash=base)
        is None
    )


def test_what_was_read_once_is_not_read_again() -> None:
    main, log = Main(), MainLog()
    base = main.head
    commits = [main.commit(f"run-{number}") for number in range(1000)]
    main.pages = 0
    assert log.find_publication(main.client, "run-7", base_hash=base, main_hash=main.head)
    first = main.pages
    for number in range(1000):
        assert log.find_publication(main.client, f"run-{number}", base_hash=base, main_hash=commits[-1])
    assert main.pages == first
    main.commit("run-new")
    assert log.find_publication(main.client, "run-new", base_hash=base, main_hash=main.head)
    assert main.pages == first + 1


def test_an_older_base_is_reached_by_reading_on() -> None:
    main, log = Main(), MainLog()
    oldest = main.head
    main.commit("run-a")
    young = main.commit()
    main.commit("run-b")
    assert log.find_publication(main.client, "run-a", base_hash=young, main_hash=main.head) is None
    assert log.find_publication(main.client, "run-a", base_hash=oldest, main_hash=main.head)
    assert log.find_publication(main.client, "run-b", base_hash=oldest, main_hash=main.head)


def test_a_publication_in_the_oldest_known_commit_counts_for_older_bases() -> None:
    main, log = Main(), MainLog()
    oldest = main.head
    published = main.commit("run-a")
    main.commit("run-b")
    assert log.find_publication(main.client, "run-b", base_hash=published, main_hash=main.head)
    assert log.find_publication(main.client, "run-a", base_hash=oldest, main_hash=main.head) == Published(
        published, is_new=False
    )


def test_main_is_rolled_back_below_a_base() -> None:
    main, log = Main(), MainLog()
    start = main.head
    base = main.commit("run-a")
    main.commit("run-b")
    assert log.find_publication(main.client, "run-b", base_hash=base, main_hash=main.head)
    main.assign(start)
    with raising(BaseNotOnMain, base[:16]):
        log.find_publication(main.client, "run-c", base_hash=base, main_hash=main.head)
    assert log.find_publication(main.client, "run-a", base_hash=start, main_hash=main.head) is None
    again = main.commit("run-a")
    assert log.find_publication(main.client, "run-a", base_hash=start, main_hash=main.head) == Published(
        again, is_new=False
    )


def test_a_base_that_never_was_on_main() -> None:
    main, log = Main(), MainLog()
    for _ in range(3):
        main.commit()
    with pytest.raises(BaseNotOnMain):
        log.find_publication(main.client, "run-a", base_hash="ab" * 32, main_hash=main.head)
    main.pages = 0
    with pytest.raises(BaseNotOnMain):
        log.find_publication(main.client, "run-b", base_hash="cd" * 32, main_hash=main.head)
    assert main.pages == 0


@pytest.mark.parametrize("most", [4, 10, 200_000])
@pytest.mark.parametrize("seed", range(20))
def test_it_agrees_with_a_log_that_knows_nothing_yet(seed: int, most: int) -> None:
    """Commits, merges by hand and roll-backs in any order, asked for with old and young bases."""
    random, main, log = Random(seed), Main(), MainLog(max_commits=most)
    heads: dict[str, str] = {}
    seen = [main.head]
    for number in range(60):
        what = random.random()
        if what < 0.5:
            main.commit(f"run-{number}")
        elif what < 0.7:
            heads[f"run-{number}"], _ = main.merge(f"run-{number}")
        elif what < 0.8:
            main.assign(random.choice(seen))
        seen.append(main.head)
        for _ in range(3):
            name = f"run-{random.randrange(number + 1)}"
            asked = {
                "base_hash": random.choice(seen[-20:]),
                "main_hash": main.head,
                "head_hash": heads.get(name),
            }
            assert _said(log, main, name, asked) == _said(MainLog(), main, name, asked)


@pytest.mark.parametrize("most", [3, 100_000])
@pytest.mark.parametrize("seed", range(20))
def test_a_process_that_has_a_file_agrees_too(seed: int, most: int, tmp_path: Path) -> None:
    """Processes end and begin between any two questions, and each continues from the file."""
    random, main = Random(seed), Main()
    file = LogFile(tmp_path / "run" / "main_log", most=most)
    log = MainLog(file=file, stored_from=2)
    heads: dict[str, str] = {}
    seen = [main.head]
    for number in range(60):
        what = random.random()
        if what < 0.5:
            main.commit(f"run-{number}")
        elif what < 0.7:
            heads[f"run-{number}"], _ = main.merge(f"run-{number}")
        elif what < 0.8:
            main.assign(random.choice(seen))
        seen.append(main.head)
        if random.random() < 0.4:
            log = MainLog(file=file, stored_from=random.choice([2, 5]))
        if random.random() < 0.05 and file.path.exists():
            file.path.write_text(file.path.read_text()[:-1])
        for _ in range(3):
            name = f"run-{random.randrange(number + 1)}"
            asked = {
                "base_hash": random.choice([*seen[-20:], seen[0]]),
                "main_hash": main.head,
                "head_hash": heads.get(name),
            }
            assert _said(log, main, name, asked) == _said(MainLog(), main, name, asked)


def test_the_next_process_reads_only_what_is_new(tmp_path: Path) -> None:
    main, file = Main(), LogFile(tmp_path / "main_log")
    base = main.head
    first = main.commit("run-a")
    for _ in range(450):
        main.commit()
    MainLog(file=file, stored_from=100).find_publication(
        main.client, "run-x", base_hash=base, main_hash=main.head
    )
    main.commit("run-b")
    main.pages = 0
    log = MainLog(file=file, stored_from=100)
    found = log.find_publication(main.client, "run-a", base_hash=base, main_hash=main.head)
    assert found == Published(first, is_new=False)
    assert main.pages == 1


@pytest.mark.parametrize(
    "content", ["", "branchlake main log 1 00\nab  \n", "branchlake main log 9\n", "\x00"]
)
def test_a_damaged_file_is_no_file(content: str, tmp_path: Path) -> None:
    file = LogFile(tmp_path / "main_log")
    assert file.load() == []
    file.path.write_text(content)
    assert file.load() == []
    commits = [StoredCommit("a"), StoredCommit("b", ("run-1", "run-2")), StoredCommit("c", (), ("d",))]
    file.save(commits)
    assert file.load() == [
        StoredCommit(one.hash, list(one.branches) or (), list(one.merged_heads) or ()) for one in commits
    ]
    assert file.path.stat().st_mode & 0o077 == 0


def test_a_folder_that_takes_no_file_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    LogFile(tmp_path / "taken" / "main_log").save([StoredCommit("a")])
    LogFile(tmp_path / "taken" / "run" / "main_log").save([StoredCommit("a")])
    assert LogFile(tmp_path / "taken" / "main_log").load() == []


def _said(log: MainLog, main: Main, name: str, asked: Any) -> Published | str | None:
    try:
        return log.find_publication(main.client, name, **asked)
    except BaseNotOnMain as error:
        return str(error)
