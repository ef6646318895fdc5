"""A program that starts an engine in processes of its own, asks it prompts and prints the answers as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    given: dict[str, Any] = json.loads(sys.argv[1])
    os.environ.update(given["environment"])
    from vllm import LLM, SamplingParams

    def parameters(tokens: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=tokens, temperature=0.0, logprobs=1, ignore_eos=True, detokenize=False
        )

    connector = {
        "kv_connector": "RetainConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": given["tiers"], "plan": False},
    }
    llm = LLM(
        model=given["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        enable_prefix_caching=False,
        disable_log_stats=True,
        kv_transfer_config=connector if given["tiers"] else None,
        **{"kv_cache_memory_bytes": 40_000_000, **given["options"]},
    )
    said = []
    for prompt in given["prompts"]:
        output = llm.generate([{"prompt_token_ids": prompt}], parameters(given["tokens"]), use_tqdm=False)[0]
        answer = output.outputs[0]
        logprobs = [
            each[token].logprob for each, token in zip(answer.logprobs, answer.token_ids, strict=True)
        ]
        said.append([list(answer.token_ids), logprobs, output.num_cached_tokens or 0])
        # An answer is there before its last blocks are stored; the engine is asked something else meanwhile.
        llm.generate([{"prompt_token_ids": [5] * 20}], parameters(6), use_tqdm=False)
        time.sleep(0.5)
    print("said " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
