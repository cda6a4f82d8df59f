"""CelesTrak and Space-Track as a server on loopback: answers of their shapes, their limits, their failures."""

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from branchlake_dagster import Terminal, Transient
from branchlake_dagster.sda.gp.read import read_catalogue
from branchlake_dagster.sda.providers.celestrak import CelesTrak
from branchlake_dagster.sda.providers.download import ProviderClock
from branchlake_dagster.sda.providers.errors import (
    ProviderBusy,
    ProviderLoginFailed,
    ProviderRefused,
    ProviderUnavailable,
)
from branchlake_dagster.sda.providers.kept import RateLimit
from branchlake_dagster.sda.providers.space_track import SpaceTrack
from branchlake_dagster_tests.sda.test_gp import OMM
from branchlake_dagster_tests.sda.test_gp_records import ENCODINGS, as_csv, as_xml, number, tle
from branchlake_dagster_tests.suite.raised import raising

NOW = datetime(2026, 8, 8, 2, 47, tzinfo=UTC).timestamp()
CSV = as_csv(number(7), number(8)).encode()


class Clock:
    """Time that passes only by sleeping; half of every random wait."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now
        self.slept: list[float] = []
        self.around = ProviderClock(
            wall_time=lambda: self.now, monotonic=lambda: self.now, sleep=self.sleep, random=lambda: 0.0
        )

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Server:
    """Answers by a function of the number of the request; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, str], str]] = []
        self.answer: Callable[[int, str], tuple[int, dict[str, str], bytes] | None] = lambda _n, _p: (
            200,
            {},
            CSV,
        )
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                headers = {name.lower(): value for name, value in self.headers.items()}
                outer.asked.append((self.command, self.path, headers, body))
                told = outer.answer(len(outer.asked), self.path)
                if told is None:
                    self.connection.close()
                    return
                status, extra, content = told
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(content))} | extra).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = _any  # noqa: N815 - the library's names

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def celestrak(server: Server, folder, **changes) -> CelesTrak:
    return CelesTrak(url=f"{server.url}/NORAD/elements/gp.php", cache_dir=str(folder), **changes)


@pytest.fixture
def space_track(server, tmp_path, monkeypatch) -> SpaceTrack:
    monkeypatch.setenv("SPACETRACK_IDENTITY", "me@example.org")
    monkeypatch.setenv("SPACETRACK_PASSWORD", "s3cret-word")
    return SpaceTrack(url=server.url, cache_dir=str(tmp_path))


# -- CelesTrak -------------------------------------------------------------------------------------------


def test_a_query_is_made_once_in_about_two_hours_also_across_restarts(server, clock, tmp_path):
    first = celestrak(server, tmp_path).pull(clock.around)
    assert first.snapshot_id == "celestrak-active-20260808T0247Z"
    assert server.asked[0][:2] == ("GET", "/NORAD/elements/gp.php?GROUP=active&FORMAT=csv")
    assert read_catalogue(first.content, "x").elements.height == 2
    clock.now += 6_999
    assert celestrak(server, tmp_path).pull(clock.around) == first
    assert len(server.asked) == 1
    celestrak(server, tmp_path, group="stations").pull(clock.around)
    assert len(server.asked) == 2, "another query is another question"
    clock.now += 2
    server.answer = lambda _n, _p: (200, {}, as_csv(number(7), number(9)).encode())
    assert celestrak(server, tmp_path).pull(clock.around).snapshot_id == "celestrak-active-20260808T0443Z"


def test_each_tick_of_a_schedule_of_two_hours_sends_a_request_however_long_downloads_take(
    server, clock, tmp_path
):
    def answer(_number: int, _path: str):
        clock.now += 40  # a slow download
        return 200, {}, CSV

    server.answer = answer
    ticks = [clock.now + 7_200 * number - early for number, early in enumerate((0, 3, 0, 3))]
    for tick in ticks:
        clock.now = tick
        celestrak(server, tmp_path).pull(clock.around)
    assert len(server.asked) == len(ticks)


@pytest.mark.parametrize(
    "unchanged",
    [
        (304, {}, b""),
        (403, {}, b"GP data has not updated since your last successful download of GROUP=active at 02:47."),
    ],
)
def test_what_is_known_is_asked_for_conditionally(server, clock, tmp_path, unchanged):
    stamps = {"Last-Modified": "Sat, 08 Aug 2026 02:00:00 GMT", "ETag": '"abc"'}
    server.answer = lambda n, _: (200, stamps, CSV) if n == 1 else unchanged
    first = celestrak(server, tmp_path).pull(clock.around)
    clock.now += 7_201
    assert celestrak(server, tmp_path).pull(clock.around) == first, "also its time, so no run is launched"
    headers = server.asked[1][2]
    assert headers["if-modified-since"] == stamps["Last-Modified"]
    assert headers["if-none-match"] == stamps["ETag"]
    clock.now += 6_999
    celestrak(server, tmp_path).pull(clock.around)
    assert len(server.asked) == 2, "the answer 'unchanged' counts as asked"


def test_a_cache_that_was_cut_or_is_of_the_future_is_fetched_again(server, clock, tmp_path):
    celestrak(server, tmp_path).pull(clock.around)
    (body,) = tmp_path.rglob("*.body")
    body.write_bytes(CSV[:50])
    assert celestrak(server, tmp_path).pull(clock.around).content == CSV
    assert len(server.asked) == 2
    clock.now -= 86_400
    celestrak(server, tmp_path).pull(clock.around)
    assert len(server.asked) == 3


@pytest.mark.parametrize("failure", [(503, {}, b"busy"), (500, {}, b""), (408, {}, b""), None])
def test_failures_that_pass_are_tried_again_with_growing_waits(server, clock, tmp_path, failure):
    server.answer = lambda n, _: (200, {}, CSV) if n == 4 else failure
    assert celestrak(server, tmp_path).pull(clock.around).content == CSV
    assert clock.slept == [0.5, 1.0, 2.0]


def test_retry_after_is_heeded_and_a_long_one_is_the_end(server, clock, tmp_path):
    server.answer = lambda n, _: (200, {}, CSV) if n == 2 else (429, {"Retry-After": "17"}, b"")
    celestrak(server, tmp_path).pull(clock.around)
    assert clock.slept == [17.0]
    server.answer = lambda _n, _p: (429, {"Retry-After": "3600"}, b"")
    with raising(ProviderUnavailable, 429):
        celestrak(server, tmp_path, group="b").pull(clock.around)
    assert clock.slept == [17.0], "it is not waited for beyond the tick"


@pytest.mark.parametrize(
    "header", ["\u00b2", "Mon, 01 Jan 2024 00:00:00 +9999999999999999", "soon", "Mon, 99 Jan 2024"]
)
def test_a_retry_after_without_sense_is_ignored(server, clock, tmp_path, header):
    server.answer = lambda n, _: (200, {}, CSV) if n == 2 else (503, {"Retry-After": header}, b"")
    celestrak(server, tmp_path).pull(clock.around)
    assert clock.slept == [0.5]


def test_a_provider_that_stays_away_is_a_transient_error(server, clock, tmp_path):
    server.answer = lambda _n, _p: (503, {}, b"maintenance until noon")
    with raising(ProviderUnavailable, 503, "maintenance until noon") as caught:
        celestrak(server, tmp_path).pull(clock.around)
    assert isinstance(caught.value, Transient)
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    "answer",
    [
        (404, {}, b"not here"),
        (403, {}, b"blocked"),
        (200, {}, b'Invalid query: "GROUP=actve" (GROUP "actve" not found)'),
        (200, {}, b"No GP data found"),
        (200, {}, b"<!DOCTYPE html><html>sorry</html>"),
        (200, {}, b""),
    ],
)
def test_refusals_are_not_repeated_and_never_kept(server, clock, tmp_path, answer):
    server.answer = lambda _n, _p: answer
    with pytest.raises(ProviderRefused) as caught:
        celestrak(server, tmp_path).pull(clock.around)
    assert isinstance(caught.value, Terminal)
    assert len(server.asked) == 1
    assert not list(tmp_path.rglob("*.body"))


PAGES = {
    "csv": [
        b"<p>NORAD_CAT_ID, busy</p>\n<p>",
        b'{"error": "NORAD_CAT_ID, busy"}\n{}',
        b"OBJECT_NAME,NORAD_CAT_ID\n",
    ],
    "json": [b'{"error": "busy"}', b'[{"error": "NORAD_CAT_ID"}]', b"[]", b"busy", b"\xef\xbb\xbf<html>"],
    "xml": [b'<?xml version="1.0"?>\n<html><body>sorry</body></html>', b"<error/>", b"busy"],
    "kvn": [b"status = busy", b"<html>CCSDS_OMM_VERS</html>"],
    "tle": [b"Too many requests\n", b"\n <html>\n1 \n2 \n</html>", b'{"error": "busy"}'],
    "3le": [b"busy"],
}
"""Answers of status 200 that are no catalogs of the format."""


@pytest.mark.parametrize(("file_format", "page"), [(name, page) for name in PAGES for page in PAGES[name]])
def test_a_page_in_place_of_a_catalog_is_refused_by_any_format(server, clock, tmp_path, file_format, page):
    server.answer = lambda _n, _p: (200, {}, page)
    with raising(ProviderRefused, 200):
        celestrak(server, tmp_path, format=file_format).pull(clock.around)
    assert not list(tmp_path.rglob("*.body"))


@pytest.mark.parametrize(
    ("file_format", "content"),
    [
        *((name, encode(number(7))) for name, encode in ENCODINGS.items()),
        ("csv", "\ufeff" + as_csv(number(7)).replace("\n", "\r\n")),
        ("csv", as_csv(number(7)).replace("NORAD_CAT_ID", '"NORAD_CAT_ID"')),
        ("json", json.dumps([number(7)], indent=2)),
        ("xml", as_xml(number(7), prefix="ndm", namespace="urn:ccsds")),
        ("tle", tle(7).replace("\n", "\r\n")),
        ("3le", f"0 NAME\n{tle(7)}"),
        ("2le", tle(7)),
    ],
)
def test_a_catalog_of_any_format_is_accepted(server, clock, tmp_path, file_format, content):
    server.answer = lambda _n, _p: (200, {}, content.encode())
    pulled = celestrak(server, tmp_path, format=file_format).pull(clock.around)
    assert read_catalogue(pulled.content, "x").elements["sat_no"].to_list() == [7]


def test_an_equal_answer_is_no_new_snapshot(server, clock, tmp_path):
    first = celestrak(server, tmp_path).pull(clock.around)
    clock.now += 7_001
    server.answer = lambda _n, _p: (200, {"ETag": '"new"'}, CSV)
    assert celestrak(server, tmp_path).pull(clock.around) == first
    clock.now += 7_001
    celestrak(server, tmp_path).pull(clock.around)
    assert len(server.asked) == 3
    assert server.asked[2][2]["if-none-match"] == '"new"'
    clock.now = NOW - 86_400  # the first answer has a time of the future
    assert celestrak(server, tmp_path).pull(clock.around).fetched_at < first.fetched_at


def test_a_cut_answer_is_no_catalogue(server, clock, tmp_path):
    server.answer = lambda n, _: (200, {"Content-Length": str(len(CSV) + (n < 3))}, CSV)
    assert celestrak(server, tmp_path, read_s=0.2).pull(clock.around).content == CSV
    assert len(server.asked) == 3


def test_an_answer_without_end_is_refused(server, clock, tmp_path):
    server.answer = lambda _n, _p: (200, {}, b"x" * (2 << 20))
    with raising(ProviderRefused, "max_download_mb"):
        celestrak(server, tmp_path, max_download_mb=1).pull(clock.around)


# -- Space-Track -----------------------------------------------------------------------------------------

GP = json.dumps([OMM]).encode()


def gate(login: bytes = b'""', *, expired: int = 0):
    """Space-Track's shape: a login that sets a cookie, 401 for as many queries as `expired`."""
    seen = [0]

    def answer(_: int, path: str):
        if path == "/ajaxauth/login":
            return 200, {"Set-Cookie": "chocolatechip=abc; path=/; HttpOnly"}, login
        seen[0] += 1
        return (401, {}, b"expired") if seen[0] <= expired else (200, {}, GP)

    return answer


def test_space_track_logs_in_by_post_and_asks_with_the_cookie(server, clock, space_track):
    server.answer = gate()
    pulled = space_track.pull(clock.around)
    login, query = server.asked
    assert login[:2] == ("POST", "/ajaxauth/login")
    assert parse_qs(login[3]) == {"identity": ["me@example.org"], "password": ["s3cret-word"]}
    assert query[1].startswith("/basicspacedata/query/class/gp/")
    assert query[2]["cookie"] == "chocolatechip=abc"
    assert pulled.snapshot_id == "spacetrack-current-20260808T0247Z"
    clock.now += 3_599
    assert space_track.pull(clock.around) == pulled
    assert len(server.asked) == 2


def test_a_session_that_ended_is_opened_again_once(server, clock, space_track):
    server.answer = gate(expired=1)
    assert space_track.pull(clock.around).content == GP
    assert [path for _, path, _, _ in server.asked].count("/ajaxauth/login") == 2
    clock.now += 4_000
    server.answer = gate(expired=9)
    with raising(ProviderRefused, 401):
        space_track.pull(clock.around)


@pytest.mark.parametrize("page", PAGES["json"])
def test_space_tracks_pages_in_place_of_a_catalog_are_refused(server, clock, space_track, page):
    login = gate()
    server.answer = lambda n, p: login(n, p) if "login" in p else (200, {}, page)
    with raising(ProviderRefused, 200):
        space_track.pull(clock.around)
    assert not list(Path(space_track.cache_dir).rglob("*.body"))


def test_an_equal_answer_of_space_track_is_no_new_snapshot(server, clock, space_track):
    server.answer = gate()
    first = space_track.pull(clock.around)
    clock.now += 3_601
    assert space_track.pull(clock.around) == first
    asked = len(server.asked)
    clock.now += 3_599
    assert space_track.pull(clock.around) == first
    assert len(server.asked) == asked, "the equal answer counts as asked"
    clock.now += 2
    server.answer = lambda n, p: gate()(n, p) if "login" in p else (200, {}, json.dumps([number(7)]).encode())
    assert space_track.pull(clock.around).snapshot_id == "spacetrack-current-20260808T0447Z"


def test_a_refused_login_is_reported_without_the_password(server, clock, space_track, monkeypatch):
    server.answer = gate(b'{"Login":"Failed"}')
    with pytest.raises(ProviderLoginFailed) as caught:
        space_track.pull(clock.around)
    assert len(server.asked) == 1, "a wrong password is not tried again: the account would be locked"
    assert "s3cret-word" not in f"{caught.value!r} {caught.value} {space_track!r}"
    monkeypatch.delenv("SPACETRACK_PASSWORD")
    with raising(ProviderLoginFailed, reason="variables_missing", subject="SPACETRACK_PASSWORD"):
        space_track.pull(clock.around)


def test_the_password_is_not_sent_where_a_login_refers_to(server, clock, space_track):
    server.answer = lambda _n, path: (
        (307, {"Location": "/elsewhere"}, b"") if "login" in path else gate()(_n, path)
    )
    with pytest.raises(ProviderLoginFailed):
        space_track.pull(clock.around)
    assert [path for _, path, _, _ in server.asked] == ["/ajaxauth/login"]


def test_a_failing_query_never_shows_the_password(server, clock, space_track):
    server.answer = lambda _n, _p: None
    with pytest.raises(ProviderUnavailable) as caught:
        space_track.pull(clock.around)
    assert "s3cret-word" not in f"{caught.value} {caught.value.__cause__}"


def test_thirty_in_a_minute_and_three_hundred_in_an_hour(clock, tmp_path):
    def limit(most_wait_s: float = 60.0) -> RateLimit:  # each as in another process
        return RateLimit(
            tmp_path / "requests.json",
            ((29, 60.0), (299, 3_600.0)),
            most_wait_s=most_wait_s,
            provider="Space-Track",
            clock=clock.around,
        )

    made = []
    for _ in range(299):
        limit().acquire()
        made.append(clock.now)
    for at in made:
        assert sum(at <= other < at + 60 for other in made) <= 29
    assert made[28] == NOW < made[29] == NOW + 60
    with raising(ProviderBusy, "Space-Track") as caught:
        limit().acquire()
    assert isinstance(caught.value, Transient)
    clock.now = made[0] + 3_600
    limit(0.0).acquire()


def test_retries_and_logins_count_as_requests(server, clock, space_track):
    server.answer = lambda n, p: (503, {}, b"") if n in (2, 3) else gate()(n, p)
    space_track.pull(clock.around)
    (stamps,) = Path(space_track.cache_dir).rglob("requests.json")
    assert len(json.loads(stamps.read_text())) == len(server.asked) == 4
