"""Report: what a request took from the cache, what it computed, and how long each part took."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Report:
    """Counts are tokens, times are seconds.

    `reused` is by tier, and `classes` the same tokens by class: exact, kin of another variant, lossy. `found`
    is what the cache had before the planner shortened it. `computed` counts prompt tokens that the model ran,
    `generated` the tokens it answered. `written` grows while blocks are stored in the background and is final
    once `Engine.settle()` has returned. `lost` is what is kept of an earlier answer behind the point where
    this prompt renders it differently. `fidelity` is what the answer's KV inherits from what was reused.
    `bypass` says why the cache was not asked, if it was not.
    """

    prompt_tokens: int = 0
    reused: dict[str, int] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)
    found: int = 0
    computed: int = 0
    generated: int = 0
    written: int = 0
    lost: int = 0
    fidelity: str = "exact"
    bypass: str = ""
    queue_seconds: float = 0.0
    lookup_seconds: float = 0.0
    load_seconds: float = 0.0
    prefill_seconds: float = 0.0
    ttft: float = 0.0

    @property
    def reused_tokens(self) -> int:
        """Tokens whose KV was not computed, all tiers."""
        return sum(self.reused.values())
