"""Conformance suites for people who write a store, a codec or an engine adapter of their own."""

from retain.errors import MissingDependency

try:
    import hypothesis  # noqa: F401
    import pytest
except ImportError as error:
    raise MissingDependency(
        f"the conformance suites need {error.name}, which is not installed: pip install pytest hypothesis"
    ) from None

pytest.register_assert_rewrite("retain.testing.store")
