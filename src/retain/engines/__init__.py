"""Engines: what turns tokens into KV. Each package here carries one engine's layout to canonical blocks and back."""
