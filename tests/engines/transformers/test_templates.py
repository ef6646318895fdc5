"""Conversations whose next turn renders the last answer in its own way: reuse ends where it differs first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from retain.cache import Cache
from retain.engines.transformers import attach
from tests.engines.transformers.test_reuse import answer, usable
from tests.engines.transformers.tiny import llama, logits_of

pytestmark = pytest.mark.engine

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TEMPLATES = {
    "as it was generated": CHATML,
    "answers stripped": CHATML.replace("{{ m.content }}", "{{ m.content | trim }}"),
    "a space before answers": "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}",
    "answers re-wrapped": "{% for m in messages %}### {{ m.role }}:\n"
    "{{ m.content | replace('\n', ' ') }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}",
    "reasoning dropped": CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"),
}

QUESTION = "Tell me, in your own words, what a memory of what was read is good for. " * 18
ANSWER = (
    "<think>They ask what a memory is good for.\nI should be brief.</think>\nIt saves reading twice. "
    + "What was read once need not be read again, and what was thought about it stays at hand.\n" * 6
)


@dataclass(frozen=True)
class Forced:
    """Lets `generate` choose only the tokens of a given answer."""

    start: int
    tokens: list[int]

    def __call__(self, batch: int, sequence: torch.Tensor) -> list[int]:
        return [self.tokens[min(len(sequence) - self.start, len(self.tokens) - 1)]]


def common(a: list[int], b: list[int]) -> int:
    size = min(len(a), len(b))
    differing = np.flatnonzero(np.array(a[:size]) != np.array(b[:size]))
    return int(differing[0]) if differing.size else size


@pytest.mark.parametrize("name", TEMPLATES)
def test_a27_the_next_turn_reuses_up_to_the_first_difference_and_tells_what_was_lost(
    name: str, cache: Cache, smollm2: Any
) -> None:
    def render(*messages: str) -> list[int]:
        roles = ("user", "assistant", "user")
        text = smollm2.tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in zip(roles, messages, strict=False)],
            chat_template=TEMPLATES[name],
            add_generation_prompt=True,
            tokenize=False,
        )
        found: list[int] = smollm2.tokenizer.encode(text, add_special_tokens=False)
        return found

    model = llama(vocab_size=len(smollm2.tokenizer), hidden_size=32, head_dim=8)
    first = render(QUESTION)
    spoken = smollm2.tokenizer.encode(ANSWER, add_special_tokens=False)
    with attach(model, smollm2.tokenizer, cache) as engine:
        engine.generate(
            torch.tensor([first]),
            max_new_tokens=len(spoken) + 1,
            do_sample=False,
            prefix_allowed_tokens_fn=Forced(len(first), [*spoken, smollm2.tokenizer.eos_token_id]),
        )
        assert engine.settle()
        computed = first + spoken
        second = render(QUESTION, ANSWER, "And what is it not good for?")
        agreed = common(computed, second)
        assert len(first) - 16 <= agreed < len(second)

        warm = engine.forward(torch.tensor([second]))
        assert warm.report.reused_tokens == usable(min(agreed, len(computed) // 16 * 16))
        assert warm.report.lost == len(computed) - agreed
        assert (name == "as it was generated") == (warm.report.lost == 0)
        assert torch.allclose(warm.logits[0, -1], logits_of(model, second), atol=1e-4)

        _, report = answer(engine, render("Something else altogether"))
        assert report.lost == 0
