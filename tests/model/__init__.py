"""Geometry, fingerprints, finding and loading of models."""
