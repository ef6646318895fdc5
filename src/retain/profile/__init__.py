"""Profiles: what the ladder codec knows of a model, learned from its KV on texts that every machine has."""
