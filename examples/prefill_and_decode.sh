#!/bin/sh
# Prefill on one server, decode on another: two servers over the node's daemon, a relay before them, one question.
set -e
retain serve smollm2 --port 8001 &
retain serve smollm2 --port 8002 &
retain relay --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002 --port 8100 &
trap 'kill %1 %2 %3' EXIT

until curl -sf http://127.0.0.1:8001/health && curl -sf http://127.0.0.1:8002/health; do sleep 1; done >/dev/null 2>&1

python3 - <<'PYTHON'
import inspect, json, textwrap, urllib.request

question = "What does this program do?\n" + inspect.getsource(textwrap)[:6000]
body = {"model": "smollm2", "messages": [{"role": "user", "content": question}], "max_tokens": 60}
request = urllib.request.Request("http://127.0.0.1:8100/v1/chat/completions", json.dumps(body).encode())
request.add_header("Content-Type", "application/json")
answer = json.load(urllib.request.urlopen(request))
print(answer["choices"][0]["message"]["content"])
print("the decode server's tokens of the prompt:", answer["retain"]["tokens"])
PYTHON
curl -s http://127.0.0.1:8100/metrics | grep '^retain_relay_prefills_total{result="done"}'
