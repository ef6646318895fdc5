"""A toy engine and tokenizer, for what only concerns the protocol: framing, stop strings, queueing, hang-
ups."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from retain.gateway.engine import Report, Sampling, Step
from retain.identity import Chain, Tokens, chain, salt_of, space_of
from retain.model import LayerSpec, ModelSpec

START, END = 256, 257
SPECIAL = {"<|im_start|>": START, "<|im_end|>": END}
CONTEXT = 4096


class ToyTokenizer:
    """One token a byte, two special tokens, and a chat template that places tools as most do."""

    chat_template = "{% for message in messages %}{{ tools }}{{ tool_calls }}"
    all_special_ids = (START, END)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        for part in re.split(r"(<\|im_start\|>|<\|im_end\|>)", text):
            ids += [SPECIAL[part]] if part in SPECIAL else list(part.encode())
        return ids

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        assert not clean_up_tokenization_spaces
        names = {token: name.encode() for name, token in SPECIAL.items()}
        data = b"".join(names[i] if i in names else bytes([i]) for i in token_ids)
        return data.decode("utf-8", "replace")

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        head = f"<tools>{json.dumps(options['tools'])}</tools>\n" if options.get("tools") else ""
        parts = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in conversation]
        if head:
            parts.insert(0, f"<|im_start|>system\n{head}<|im_end|>\n")
        return "".join(parts) + "<|im_start|>assistant\n"

    def get_vocab(self) -> dict[str, int]:
        return {f"{i:x}": i for i in range(258)}

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [f"<0x{i:02X}>" for i in ids]


class ToyEngine:
    """Answers with the bytes that `script` gives, a token at a time; `pace` seconds a step; `gate` holds all
    steps."""

    context = CONTEXT
    spec = ModelSpec("toy", "toy", (LayerSpec("full", 1, 4, 4),), "float32", kin=b"k" * 32, variant=b"v" * 32)

    def __init__(self, script: str | bytes = "Hello.", *, pace: float = 0.0, finish: str = "stop") -> None:
        self.tokenizer = ToyTokenizer()
        self.script = script.encode() if isinstance(script, str) else script
        self.pace = pace
        self.finish = finish
        self.gate = threading.Event()
        self.gate.set()
        self.started: list[tuple[list[int], Sampling, bytes]] = []
        self.steps = 0
        self.ended = 0
        self.fails: Exception | None = None
        self.report = Report(tokens_by_tier={"memory": 3, "disk": 2}, found=5, computed=7, written=16)

    def run(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        tenant: str | None,
        cache_salt: str | None,
        fidelity: str | None,
        cancelled: Callable[[], bool],
        progress: Callable[[float], None],
    ) -> ToyRun:
        self.started.append((list(tokens), sampling, self.chain((), tenant, cache_salt).space))
        return ToyRun(self, sampling, cancelled)

    def chain(self, tokens: Sequence[int] | Tokens, tenant: str | None, cache_salt: str | None) -> Chain:
        return chain(space_of(self.spec.kin, self.spec.adapter, salt_of(tenant, cache_salt)), tokens)

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


class ToyRun:
    def __init__(self, engine: ToyEngine, sampling: Sampling, cancelled: Callable[[], bool]) -> None:
        self._engine = engine
        self._sampling = sampling
        self._cancelled = cancelled

    @property
    def report(self) -> Report:
        return self._engine.report

    def __iter__(self) -> Iterator[Step]:
        engine = self._engine
        tokens = [*engine.script, *([END] if engine.finish == "stop" else [])]
        top = self._sampling.top_logprobs
        for index, token in enumerate(tokens[: self._sampling.max_tokens]):
            while not engine.gate.wait(0.01):
                if self._cancelled():
                    return
            if engine.fails is not None:
                raise engine.fails
            if engine.pace:
                time.sleep(engine.pace)
            if self._cancelled():
                return
            engine.steps += 1
            last = index + 1 == min(len(tokens), self._sampling.max_tokens)
            finish = "stop" if token == END else "length" if last else None
            likely = ((token, -0.5), (65, -1.5), (66, -2.5))
            yield Step(token, finish, None if top is None else -0.5, likely[:top] if top else ())

    def close(self) -> None:
        self._engine.ended += 1
