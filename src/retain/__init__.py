"""Retain keeps what inference engines compute and throw away: the KV cache, as a layer of its own."""

from retain.cache import open_cache as open

__version__ = "0.1.0"

__all__ = ["__version__", "open"]
