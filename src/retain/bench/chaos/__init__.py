"""Bench `chaos`: what breaks under Retain while it is used, and what that costs: a miss, never more."""
