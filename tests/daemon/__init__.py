"""Tests of the daemon: real processes, real sockets."""
