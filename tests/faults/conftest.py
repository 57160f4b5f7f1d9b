"""The suite of the tests of this folder."""

from tests.background_suite import suite

__all__ = ["suite"]
