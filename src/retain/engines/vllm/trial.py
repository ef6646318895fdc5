"""An engine in processes of its own that is asked prompts over a pipe: what benches of vLLM measure.

Its arguments and requests are JSON; `retain.bench.vllm_ttft` is the other end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Start the engine that argument 1 describes, then answer one request a line until the input ends."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    os.environ.update(given["environment"])
    from vllm import LLM, SamplingParams

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what engines print must not come between the answers
    llm = LLM(**given["engine"])
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        if "metric" in asked:
            print(json.dumps({"value": _metric(asked["metric"])}), file=answers)
            continue
        parameters = SamplingParams(
            max_tokens=asked["max_tokens"],
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=asked.get("logprobs"),
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        began = time.perf_counter()
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        told = {
            "seconds": time.perf_counter() - began,
            "answers": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens or 0 for output in outputs],
            "likeliest": [_likeliest(output.outputs[0].logprobs or ()) for output in outputs],
        }
        print(json.dumps(told), file=answers)


def _metric(name: str) -> float:
    """A counter's sum over its labels. vLLM's own reader of its metrics cuts them to whole numbers."""
    from prometheus_client import REGISTRY

    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    return float(sum(sample.value for sample in samples if sample.name == name))


def _likeliest(logprobs: Any) -> list[list[float]]:
    """The log probabilities of the likeliest tokens at each place of an answer, the highest first."""
    return [sorted((each.logprob for each in place.values()), reverse=True) for place in logprobs]


if __name__ == "__main__":
    main()
