"""Measurements of Retain beside its peers and its limits; each bench returns a Report."""
