"""Making a profile with an engine: its KV on some texts, gradients on a few, what each level then costs."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from retain.codecs.ladder.profile import Profile
from retain.errors import ConfigError
from retain.fidelity import PROMISED
from retain.identity import BLOCK_TOKENS, Tokens
from retain.model import ModelSpec
from retain.profile.gather import Gathered, Sample, arrays_of, plan
from retain.profile.learn import group_for, learn, with_tables
from retain.profile.measure import KV, Judge, measure
from retain.profile.sensitivity import Gradients, Sensitivity, by_noise

TEXTS = 28
TEXT_TOKENS = 2048
AFTER_TOKENS = 384
"""The tokens of a text whose predictions are watched; the KV of those before them is coded."""

FELT = 6
"""Texts that gradients are taken on: weights hardly change with more."""

TABLE_TEXTS = 4
JUDGED = 2
FEWEST = FELT + TABLE_TEXTS

AIMS: Mapping[str, float] = {"fine": 1.5e-5, "near": 1.0e-4, "balanced": 7e-4, "tiny": 4.7e-3}
"""The mean KL a level may have on the texts it is judged by: three quarters of what it promises, for other
texts are harder."""

MORE_STEPS = 3
"""How often a finer step is tried where a level does not keep what it promises."""

GUESS = 0.4
"""Measured KL over what weights alone predict: token importance keeps errors from where they cost most."""


class Engine(Protocol):
    """What a model has to be able to do for a profile: retain.engines.transformers.study.Study."""

    spec: ModelSpec

    def context(self, tokens: Tokens) -> KV: ...

    def reference(self, kv: KV, after: Tokens) -> Judge: ...

    def gradients(self, kv: KV, tokens: Tokens, seed: int) -> KV: ...


def steps(texts: int) -> int:
    """How many steps `make` tells of."""
    return texts + FELT + 2 + 2 * JUDGED


def make(
    engine: Engine,
    texts: Sequence[Tokens],
    width: int,
    tell: Callable[[str, int], None] = lambda text, done: None,
    *,
    noise: bool = False,
    stored: Sequence[Sample] = (),
) -> Profile:
    """A profile of the engine's model, learned from texts of equal kinds in every stretch of them.

    `width` is that of its parts, at the most. With `noise` sensitivities are found by trying instead of by
    gradients. Where blocks are `stored` already, their KV is learned from as well as that of the texts.
    Raises ConfigError for too few texts, UnsupportedModel.
    """
    if len(texts) < FEWEST or min(len(text) for text in texts) <= AFTER_TOKENS + BLOCK_TOKENS:
        raise ConfigError(
            f"a profile is learned from at least {FEWEST} texts of more than {AFTER_TOKENS + BLOCK_TOKENS} "
            f"tokens each; there are {len(texts)}"
        )
    spec = engine.spec
    plans = plan(spec.layers, group_for(spec, width))
    felt = Gradients(spec.layers)
    tried: Sensitivity | None = None
    samples: list[Sample] = []
    judges: list[tuple[Sample, Judge]] = []
    with (
        tempfile.TemporaryDirectory(prefix="retain-profile-") as folder,
        Gathered(spec.layers, plans, Path(folder)) as gathered,
    ):
        for sample in stored:
            gathered.add(sample)
        for number, text in enumerate(texts):
            tell("KV of texts", 0)
            kv = engine.context(text)
            sample = Sample(arrays_of(spec.layers, kv), text, 0)
            cut = len(text) - AFTER_TOKENS
            context = [(k[:, :cut], v[:, :cut]) for k, v in kv]
            tell("KV of texts", 1)
            if number < FELT and not noise:
                tell("gradients", 0)
                felt.add(context, engine.gradients(context, text[cut:], number))
                tell("gradients", 1)
            elif number == 0:
                tell("sensitivities, by noise", 0)
                judge = engine.reference(context, text[cut:])
                tried = by_noise(spec.layers, context, judge, AFTER_TOKENS, plans)
                tell("sensitivities, by noise", FELT)
            if number < len(texts) - TABLE_TEXTS:
                gathered.add(sample)
            else:
                samples.append(sample)
            if number >= len(texts) - JUDGED:
                held = Sample(arrays_of(spec.layers, context), text[:cut], 0)
                judges.append((held, engine.reference(context, text[cut:])))
        sensitivity = tried or felt.sensitivity(plans)
        step = _first_step(spec, len(texts[-1]) - AFTER_TOKENS)
        tell("principal components", 0)
        profile = learn(spec, gathered, sensitivity, samples, step, lambda text: tell(text, 0))
        tell("principal components", 1)
    found = measure(profile, judges, tell)
    tell("tables for the step that was found", 0)
    profile = with_tables(_with_step(profile, found), samples)
    tell("tables for the step that was found", 1)
    found = measure(profile, judges, tell)
    for _ in range(MORE_STEPS):
        if all(kl <= PROMISED[level] for level, (kl, _) in found.items()):
            break
        profile = with_tables(_with_step(profile, found), samples)
        found = measure(profile, judges, lambda text, done: tell(f"{text}, with a finer step", 0))
    return replace(profile, declared=found)


def _with_step(profile: Profile, found: Mapping[str, tuple[float, float]]) -> Profile:
    """The profile with the step at which what was measured would be what is aimed at, if KL grew as its
    square.
    """
    share = min(AIMS[level] / max(kl, 1e-12) for level, (kl, _) in found.items())
    return replace(profile, step=profile.step * math.sqrt(share), tables=None)


def _first_step(spec: ModelSpec, context: int) -> float:
    """The step at which weights predict the KL that `fine` aims at: values * step**2 / (24 * tokens)."""
    values = context * sum(layer.heads * (layer.k_dim + layer.v_dim) for layer in spec.layers)
    return math.sqrt(24 * AFTER_TOKENS * AIMS["fine"] / GUESS / values)
