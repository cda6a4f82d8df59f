import pickle

import pytest

from branchlake_dagster import errors
from branchlake_dagster.nessie import errors as nessie_errors
from branchlake_dagster.nessie.model import ContentKey, KeyConflict

ALL = [
    value
    for value in (vars(errors) | vars(nessie_errors)).values()
    if isinstance(value, type) and issubclass(value, errors.BranchlakeError)
]
CONCRETE = [cls for cls in ALL if cls not in (errors.BranchlakeError, nessie_errors.NessieError)]
MARKERS = (errors.Transient, errors.Terminal, errors.OutcomeUnknown)


@pytest.mark.parametrize("cls", CONCRETE)
def test_every_error_has_exactly_one_marker(cls: type[errors.BranchlakeError]) -> None:
    assert sum(issubclass(cls, marker) for marker in MARKERS) == 1


@pytest.mark.parametrize("cls", ALL)
def test_every_error_survives_pickling(cls: type[errors.BranchlakeError]) -> None:
    error = cls("It broke.", table="a.t", partitions=["p1"], branch="run-1", run_id="1", hint="Do that.")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert vars(copy) == vars(error)
    assert str(copy) == str(error) == "It broke. [table a.t, partition p1, branch run-1, run 1] Do that."


def test_long_partition_lists_are_cut() -> None:
    error = errors.BranchlakeError("No.", partitions=[f"p{i}" for i in range(7)])
    assert str(error) == "No. [partitions p0, p1, p2, p3, p4 and 2 more]"
    assert len(error.partitions) == 7


def test_conflicts_are_listed_with_key_and_kind() -> None:
    conflicts = [
        KeyConflict(ContentKey(["a", "t"]), "VALUE_DIFFERS", "m"),
        KeyConflict(None, "UNEXPECTED_HASH", "m"),
    ]
    error = nessie_errors.NessieConflict("Refused.", conflicts=conflicts)
    assert str(error) == "Refused. Conflicts: a.t (VALUE_DIFFERS), UNEXPECTED_HASH."
    assert error.status == 409
    assert pickle.loads(pickle.dumps(error)).conflicts == tuple(conflicts)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("at http://me:secret@host/x", "at http://***@host/x"),
        ("at s3://key:se@cret@bucket/x", "at s3://***@bucket/x"),
        ("at http://host/x@y", "at http://host/x@y"),
        ("mail a@b", "mail a@b"),
    ],
)
def test_url_credentials_never_show(text: str, clean: str) -> None:
    error = errors.ConfigurationError(text, hint=text)
    assert error.message == error.hint == clean
    assert "secret" not in repr(error)


def test_unsupported_is_what_pyiceberg_raises() -> None:
    assert issubclass(errors.Unsupported, NotImplementedError)
