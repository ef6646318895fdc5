"""The daemon: one process a node keeps the cache, so that it outlives engines and is shared by them.

`wire` is the protocol (docs/protocol.md), `server` the process, `client` what engines hold instead of a
Cache, `start` finds the daemon of a configuration or starts one.
"""
