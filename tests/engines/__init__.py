"""Tests of the engines, with the engines themselves."""
