"""Tests of the cache over real stores."""
