"""The gate of the gate's own tests, for the rows of the table that it answers."""

from tests.defense.conftest import candidates

__all__ = ["candidates"]
