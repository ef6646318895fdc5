"""Bench dialogues: tau-bench's conversations replayed turn by turn against vLLM, with Retain and without."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retain.bench.codec_texts import packed_text
from retain.bench.progress import Steps
from retain.bench.report import Report, Value
from retain.bench.server import OwnDaemons
from retain.bench.vllm_trial import Told, Trial
from retain.errors import ConfigError
from retain.gateway.tokenizer import Tokenizer
from retain.identity import BLOCK_TOKENS, TAIL_TOKENS, Tokens

MODEL = "smollm2"
CONTEXT = 8192
ARCHIVE, FILE = "text_licence_clear.tar.zst", "gpt-4o-airline.json"
TIERS = ("memory:1GiB", "disk:{folder}?capacity=24GiB")


@dataclass(frozen=True)
class Turn:
    """One request of a dialogue: everything said before it, as tokens."""

    dialogue: int
    prompt: Tokens


@dataclass(frozen=True)
class Said:
    """An engine's answer to a turn: tokens, how much of the prompt was found, seconds, and by how much the
    likeliest token led over the next at each place, in nats.
    """

    tokens: tuple[int, ...]
    cached: int
    seconds: float
    leads: tuple[float, ...]


def run(data: Path | None, dialogues: int, turns: int | None, answer_tokens: int) -> Report:
    """Replay the first `dialogues` dialogues, of each the first `turns` turns (None: all that fit).

    `data` is the folder of texts. Raises ConfigError.
    """
    if data is None:
        raise ConfigError("the dialogues are in the folder of texts: give --data FOLDER or set RETAIN_DATA")
    replayed = read_turns(data, dialogues, turns, CONTEXT - answer_tokens)
    with (
        Steps("dialogues", 2 * len(replayed)) as steps,
        tempfile.TemporaryDirectory(prefix="retain-bench-") as folder,
        OwnDaemons() as daemons,
    ):
        with _engine(Path(folder), {}, {}) as engine:
            plain = _replay(engine, replayed, answer_tokens, steps, "without Retain")
            noise = _noise(engine, replayed, plain, answer_tokens)
        tiers = ["daemon", *(tier.format(folder=Path(folder) / "kv") for tier in TIERS)]
        connector = {
            "kv_connector": "RetainConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"tiers": tiers},
        }
        with _engine(Path(folder), {"kv_transfer_config": connector}, daemons.environment) as engine:
            kept = _replay(engine, replayed, answer_tokens, steps, "with Retain")
    return _report(replayed, plain, kept, noise)


def read_turns(data: Path, dialogues: int, turns: int | None, room: int) -> list[Turn]:
    """The turns in the order of their replay: the first of every dialogue, then the second, and so on, as
    people who talk at the same time would come. A dialogue ends where it no longer fits `room` tokens.
    """
    from retain.engines.transformers.loading import load_tokenizer

    tokenizer = Tokenizer(load_tokenizer(MODEL))
    found: list[tuple[int, Turn]] = []
    for number, each in enumerate(json.loads(packed_text(data, ARCHIVE, FILE))[:dialogues]):
        messages = [{**message, "content": message.get("content") or ""} for message in each["traj"]]
        ends = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for place, end in enumerate(ends[:turns]):
            prompt = tokenizer.encode(tokenizer.chat(messages[:end], ()))
            if prompt.size > room:
                break
            found.append((place, Turn(number, prompt)))
    return [turn for _, turn in sorted(found, key=lambda item: item[0])]


def allowed(turns: Sequence[Turn], answers: Sequence[Sequence[int]]) -> list[int]:
    """How many tokens of each prompt a cache without bounds can serve, by the rules of blocks and tails.

    What was kept of an earlier prompt and its answer ends with a whole step of its tail, and its answer's
    last token has no KV; a prompt uses whole blocks, and a part of the next from 16 tokens on; its own last
    token is always computed.
    """
    kept: list[Tokens] = []
    served = []
    for turn, answer in zip(turns, answers, strict=True):
        prompt = turn.prompt
        shared = max((_common(prompt[:-1], earlier) for earlier in kept), default=0)
        rest = shared % BLOCK_TOKENS
        served.append(shared if rest >= TAIL_TOKENS else shared - rest)
        whole = np.concatenate([prompt, np.asarray(answer[:-1], np.uint32)])
        kept.append(whole[: whole.size - whole.size % TAIL_TOKENS])
    return served


def _common(one: Tokens, other: Tokens) -> int:
    size = min(one.size, other.size)
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if differs.size else size


def _replay(engine: Trial, turns: Sequence[Turn], answer_tokens: int, steps: Steps, what: str) -> list[Said]:
    said = []
    for turn in turns:
        said += _said(engine.ask([turn.prompt.tolist()], answer_tokens, logprobs=2))
        steps.step(what)
    return said


def _said(told: Told) -> list[Said]:
    return [
        Said(tokens, cached, told.seconds, tuple(place[0] - place[1] for place in likeliest))
        for tokens, cached, likeliest in zip(told.answers, told.cached, told.likeliest, strict=True)
    ]


def _noise(engine: Trial, turns: Sequence[Turn], alone: Sequence[Said], answer_tokens: int) -> float:
    """By how much the lead of the likeliest token changes, at the most, when prompts are computed together
    with others instead of alone: every dialogue's last turn, all at once.
    """
    last = {turn.dialogue: place for place, turn in enumerate(turns)}
    together = _said(
        engine.ask([turns[place].prompt.tolist() for place in last.values()], answer_tokens, logprobs=2)
    )
    return max(_drift(alone[place], said) for place, said in zip(last.values(), together, strict=True))


def _drift(one: Said, other: Said) -> float:
    """The largest change of a lead, up to the first token that differs."""
    first = _first_difference(one, other)
    until = len(one.tokens) if first is None else first + 1
    return max(abs(a - b) for a, b in zip(one.leads[:until], other.leads[:until], strict=True))


def _first_difference(one: Said, other: Said) -> int | None:
    pairs = enumerate(zip(one.tokens, other.tokens, strict=True))
    return next((place for place, (a, b) in pairs if a != b), None)


def _engine(folder: Path, options: Mapping[str, Any], environment: Mapping[str, str]) -> Trial:
    from retain.engines.transformers.loading import prepared

    base = {
        "model": str(prepared(MODEL)),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": CONTEXT,
        "kv_cache_memory_bytes": 800_000_000,
        "disable_log_stats": True,
    }
    return Trial({**base, **options}, environment, folder / "engine.log")


def _report(turns: Sequence[Turn], plain: Sequence[Said], kept: Sequence[Said], noise: float) -> Report:
    possible = allowed(turns, [said.tokens for said in kept])
    differences = [_first_difference(a, b) for a, b in zip(plain, kept, strict=True)]
    leads = [said.leads[place] for said, place in zip(plain, differences, strict=True) if place is not None]
    rows: list[dict[str, Value]] = []
    for dialogue in dict.fromkeys(turn.dialogue for turn in turns):
        own = [place for place, turn in enumerate(turns) if turn.dialogue == dialogue]
        rows.append(
            {
                "dialogue": dialogue,
                "turns": len(own),
                "prompt_tokens": sum(int(turns[place].prompt.size) for place in own),
                "served_tokens": sum(kept[place].cached for place in own),
                "allowed_tokens": sum(possible[place] for place in own),
                "other_answers": sum(differences[place] is not None for place in own),
                "without_seconds": sum(plain[place].seconds for place in own),
                "with_seconds": sum(kept[place].seconds for place in own),
            }
        )
    total = sum(int(turn.prompt.size) for turn in turns)
    ratios = {
        "dialogues.served_share": sum(said.cached for said in kept) / total,
        "dialogues.allowed_share": sum(possible) / total,
        "dialogues.without_over_with_seconds": sum(said.seconds for said in plain)
        / sum(said.seconds for said in kept),
        "dialogues.other_answers_share": len(leads) / len(turns),
        "dialogues.noise_nats": noise,
        "dialogues.drift_nats": max(_drift(a, b) for a, b in zip(plain, kept, strict=True)),
        "dialogues.lead_where_answers_differ_nats": max(leads, default=0.0),
    }
    served = ratios["dialogues.served_share"] >= ratios["dialogues.allowed_share"] - 0.01
    return Report(
        "dialogues",
        rows,
        ratios,
        {"served_within_a_point": served, "answers_equal_up_to_noise": all(lead <= noise for lead in leads)},
    )
