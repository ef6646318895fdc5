"""Stores: where objects lie. A store holds immutable bytes under a name and knows nothing about KV."""
