"""Every family whose layers Retain reads: a prompt read twice gives the logits of a full prefill."""

from __future__ import annotations

from contextlib import closing

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

import retain
from retain.engines.transformers import attach
from tests.model.tiny import CONFIGS, tiny_model


@pytest.mark.engine
@pytest.mark.parametrize("name", CONFIGS)
def test_a33_kept_kv_of_every_geometry_gives_the_logits_of_a_full_prefill(name: str) -> None:
    model = tiny_model(name)
    # Rules that turn by length keep nothing beyond their original length, which is 64 tokens in the tiny
    # model.
    length = 60 if name == "phi3-longrope" else 200
    tokens = torch.randint(0, 128, (1, length), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(input_ids=tokens).logits[0, -1]
    with closing(retain.open("memory:16MiB")) as cache:
        engine = attach(model, None, cache)
        for reused in (0, length // 16 * 16):
            found = engine.forward(tokens).logits[0, -1]
            assert engine.last_report.found == reused
            assert torch.allclose(found, expected, atol=1e-5)
            cache.flush()
