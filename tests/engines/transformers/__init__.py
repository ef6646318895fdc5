"""Tests of the transformers engine."""
