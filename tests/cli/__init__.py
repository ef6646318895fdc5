"""The command line under test."""
