"""Ask a Retain server through OpenAI's own client, and see what it did not have to compute.

retain serve smollm2
python examples/openai_client.py
"""

import sys
import textwrap
from pathlib import Path

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")  # or the key of your tenant
document = Path(textwrap.__file__).read_text()

for question in ("What does this program do?", "Name one of its functions."):
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {"role": "system", "content": f"You answer questions about this program:\n\n{document}"},
            {"role": "user", "content": question},
        ],
        max_tokens=40,
        temperature=0,
    )
    print(question, answer.choices[0].message.content)
    usage = answer.usage
    print(f"  {usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} tokens were kept")
    print(f"  {answer.model_extra['retain']}")
