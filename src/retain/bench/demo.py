"""The demo: questions about a long program, cold, warm and restarted, beside a server without Retain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retain.bench.report import Report, Value, new_figure
from retain.bench.server import OwnDaemons, ServerError, ServerProcess
from retain.bench.texts import Program, program
from retain.errors import MissingDependency

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL = "smollm2"
PROGRAM_TOKENS = (4_000, 6_000)
"""Long enough to be slow without Retain, and well inside the model's context of 8,192."""

ANSWER_TOKENS = 48
TIERS = ("memory:2GiB", "disk:{folder}/kv?capacity=5GiB")

QUESTIONS = (
    "In one sentence: what does this program do?",
    "Which functions can other programs call? List their names.",
    "What is the first class defined in it, and what is it for?",
)
STAGES = ("first question, nothing kept", "second question, same server", "third question, server restarted")

Say = Callable[[str], None]
"""Told, in a few words, what happens now."""


@dataclass(frozen=True)
class Answer:
    """One answer: its text, the seconds to its first token, and where the tokens of its prompt came from."""

    text: str
    ttft: float
    prompt_tokens: int
    memory_tokens: int
    disk_tokens: int

    @property
    def reused_tokens(self) -> int:
        return self.memory_tokens + self.disk_tokens

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.reused_tokens


def run(folder: Path, say: Say) -> Report:
    """Ask the questions of a server with a memory and a disk tier in `folder`, then of one without.

    Every server and daemon started has ended when this returns or raises.
    """
    document = choose()
    say(f"the document: Python's {document.name} module, {document.tokens:,} tokens")
    tiers = [part for tier in TIERS for part in ("--tier", tier.format(folder=folder))]
    kept: list[Answer] = []
    say("starting `retain serve smollm2`; the node's daemon keeps a memory and a disk tier")
    with OwnDaemons() as daemons:
        with ServerProcess(MODEL, tiers, folder, daemons) as server:
            kept.extend(_ask_all(server, document, (0, 1), say))
            say("stopping the server")
        say("stopping the daemon: what remains lies on disk")
        if daemons.stop() != 1:
            raise ServerError(f"the server kept its KV in no daemon; its log is {folder / 'server.log'}")
        say("starting both again")
        with ServerProcess(MODEL, tiers, folder, daemons) as server:
            kept.extend(_ask_all(server, document, (2,), say))
    say("the same questions without Retain: starting `retain serve smollm2 --no-cache`")
    with ServerProcess(MODEL, ["--no-cache"], folder) as server:
        plain = list(_ask_all(server, document, (0, 1, 2), say))
    return report(kept, plain)


def choose() -> Program:
    """The program that is asked about."""
    from retain.engines.transformers.loading import load_tokenizer

    tokenizer = load_tokenizer(MODEL)
    return program(lambda source: len(tokenizer.encode(source)), *PROGRAM_TOKENS)


def report(kept: list[Answer], plain: list[Answer]) -> Report:
    """Put the answers with Retain beside those without."""
    rows: list[dict[str, Value]] = [
        {
            "stage": stage,
            "question": question,
            "ttft_seconds": with_retain.ttft,
            "without_retain_ttft_seconds": without.ttft,
            "computed_tokens": with_retain.computed_tokens,
            "memory_tokens": with_retain.memory_tokens,
            "disk_tokens": with_retain.disk_tokens,
            # Where nothing was reused, the difference between two cold runs is noise.
            "saved_seconds": without.ttft - with_retain.ttft if with_retain.reused_tokens else None,
            "answer_equal": with_retain.text == without.text,
            "answer": with_retain.text,
            "answer_without_retain": without.text,
        }
        for stage, question, with_retain, without in zip(STAGES, QUESTIONS, kept, plain, strict=True)
    ]
    _, warm, restarted = kept
    return Report(
        "demo",
        rows,
        {
            "demo.cold_over_memory": plain[1].ttft / warm.ttft,
            "demo.cold_over_restart": plain[2].ttft / restarted.ttft,
            "demo.saved_seconds": sum(float(row["saved_seconds"] or 0) for row in rows),
        },
        {
            "text_equal": all(a.text == b.text for a, b in zip(kept, plain, strict=True)),
            "memory_reused": warm.memory_tokens > 0,
            "disk_reused": restarted.disk_tokens > 0,
            "nothing_reused_without_retain": not any(answer.reused_tokens for answer in plain),
        },
    )


def _ask_all(server: ServerProcess, document: Program, numbers: Iterable[int], say: Say) -> Iterable[Answer]:
    for number in numbers:
        say(f"question {number + 1}: {QUESTIONS[number]}")
        answer = ask(server.url, document, QUESTIONS[number])
        reused = f"{answer.reused_tokens:,} of {answer.prompt_tokens:,} tokens reused"
        say(f"  first token after {answer.ttft:.2f} s; {reused}")
        yield answer


def ask(url: str, document: Program, question: str) -> Answer:
    """One question through the official client, streamed."""
    try:
        import openai
    except ImportError:
        raise MissingDependency("the demo asks through OpenAI's client: pip install openai") from None
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300.0, max_retries=0)
    messages: Any = [
        {"role": "system", "content": f"You answer questions about this program:\n\n{document.source}"},
        {"role": "user", "content": question},
    ]
    text, first, usage = "", 0.0, None
    told: dict[str, Any] = {}
    began = time.perf_counter()
    with client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            part = (chunk.choices[0].delta.content or "") if chunk.choices else ""
            if part and not first:
                first = time.perf_counter() - began
            text += part
            usage = chunk.usage or usage
            told = (chunk.model_extra or {}).get("retain") or told
    seconds = time.perf_counter() - began
    tokens = told.get("tokens", {})
    prompt = usage.prompt_tokens if usage else 0
    memory, disk = int(tokens.get("memory", 0)), int(tokens.get("disk", 0))
    return Answer(text, first or seconds, prompt, memory, disk)


def plot(found: Report) -> Figure:
    """Seconds to the first token of each question, without Retain and with it."""
    figure, axes = new_figure(8.0, 3.6)
    labels = [
        "first question\n(nothing kept yet)",
        "second question\n(from memory)",
        "third question\n(restarted, from disk)",
    ]
    height = 0.38
    for offset, key, color, name in (
        (-height / 2, "without_retain_ttft_seconds", "#b8bec9", "without Retain"),
        (height / 2, "ttft_seconds", "#1f77d0", "with Retain"),
    ):
        seconds = [float(row[key] or 0) for row in found.rows]
        bars = axes.barh([at + offset for at in range(3)], seconds, height, color=color, label=name)
        axes.bar_label(bars, [f"{value:.2f} s" for value in seconds], padding=4, color="0.25")
    axes.set_yticks(range(3), labels)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", alpha=0.25)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.12)
    axes.set_xlabel("seconds to the first token")
    machine = found.machine
    prompt = sum(int(found.rows[0][key] or 0) for key in ("computed_tokens", "memory_tokens", "disk_tokens"))
    axes.set_title("Nobody should pay twice for the same input", loc="left", fontweight="bold")
    figure.supxlabel(
        f"SmolLM2-135M, float32, {machine.cores} cores of {machine.cpu}; a prompt of {prompt:,} tokens",
        fontsize="small",
        color="0.4",
    )
    # Beside the shortest bar, where there is room whatever the seconds are.
    axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1.0, 0.44), ncols=2)
    return figure
