"""A process that was forked does not use the connections of its parent."""

from __future__ import annotations

import os

import pytest

from branchlake_dagster.nessie.transport import HttpTransport


def test_a_forked_process_opens_its_own_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = HttpTransport(
        "http://127.0.0.1:1/api/v2", token=None, verify=True, connect_timeout_s=1.0, read_timeout_s=1.0
    )
    session_of_parent = transport._session()
    assert transport._session() is session_of_parent
    closed: list[bool] = []
    monkeypatch.setattr(session_of_parent, "close", lambda: closed.append(True))
    with monkeypatch.context() as context:
        context.setattr(os, "getpid", lambda: -1)  # as in a child
        session_of_child = transport._session()
        assert session_of_child is not session_of_parent
        assert transport._session() is session_of_child
        transport.close()
    assert not closed
