"""docs/format.md tells the truth: every digest printed there is recomputed."""

import re
import subprocess
from pathlib import Path

from retain.identity import chain, content_key, root_key, salt_of, space_of

PAGE = (Path(__file__).parent.parent / "docs" / "format.md").read_text()


def test_the_worked_example_of_the_format_page_is_right():
    space = space_of(bytes(range(32)))
    made = chain(space, range(40), 16)
    expected = {
        "space": space,
        "key_0": root_key(space),
        "key_1 (tokens 0 to 15)": made.keys[0],
        "key_2 (tokens 16 to 31)": made.keys[1],
        "key_3 (tokens 32 to 39)": made.key(2, 8),
        "content key of tokens 0 to 15": content_key(made.block(0)),
        "salt of tenant `alice`": salt_of("alice"),
    }
    printed = dict(re.findall(r"^\| (.+?) \| `([0-9a-f]{64})` \|$", PAGE, re.MULTILINE))
    assert printed == {name: value.hex() for name, value in expected.items()}


def test_the_shell_lines_of_the_format_page_print_the_space():
    script = re.search(r"(    \{ printf .*?sha256sum)", PAGE, re.DOTALL)
    assert script is not None
    run = subprocess.run(["bash", "-c", script.group(1)], capture_output=True, text=True, check=True)
    assert run.stdout.split()[0] == space_of(bytes(range(32))).hex()
