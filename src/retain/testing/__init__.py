"""Conformance suites for people who write a store, a codec or an engine adapter of their own."""

import pytest

pytest.register_assert_rewrite("retain.testing.store")
