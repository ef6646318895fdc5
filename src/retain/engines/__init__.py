"""Engines: what turns tokens into KV. Each package carries one engine's layout to canonical blocks."""
