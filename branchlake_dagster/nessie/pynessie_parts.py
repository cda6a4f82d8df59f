"""The parts of pynessie that the client uses. docs/adr/0002-nessie-client.md gives the reasons."""

import warnings

with warnings.catch_warnings():
    # pynessie 0.67 uses marshmallow arguments that marshmallow 3 deprecates, so importing it warns. Where
    # warnings are errors (our tests, a strict code location), the import itself fails.
    warnings.simplefilter("ignore")
    from pynessie.auth.bearer import TokenAuth
    from pynessie.model import is_valid_hash, is_valid_reference_name, split_into_reference_and_hash

__all__ = ["TokenAuth", "is_valid_hash", "is_valid_reference_name", "split_into_reference_and_hash"]
