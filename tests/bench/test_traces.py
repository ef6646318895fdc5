"""Reading traces: packed and unpacked alike, local block numbers made global, what is no trace refused."""

import io
import json
import tarfile

import pytest
import zstandard

from retain.bench.traces import read_trace
from retain.errors import ConfigError

CONVERSATION = "\n".join(
    json.dumps({"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": ids})
    for length, ids in ((1300, [0, 1, 2]), (512, [0]), (100, [7]))
)


def agent(place: int) -> str:
    """A conversation of two requests, the second by a sub-agent."""
    sub = {
        "t": 5.0,
        "type": "subagent",
        "requests": [{"t": 6.0 - place, "type": "n", "in": 64, "hash_ids": [1]}],
    }
    first = {"t": float(place), "type": "n", "in": 130, "hash_ids": [1, 2, 3]}
    return json.dumps({"id": f"trace_{place:04}", "block_size": 64, "requests": [first, sub]})


def packed(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(buffer.getvalue())


@pytest.fixture(params=["packed", "unpacked"])
def folder(request, tmp_path):
    mooncake = {
        "mooncake/conversation_trace.jsonl": CONVERSATION,
        "mooncake/synthetic_trace.jsonl": CONVERSATION,
    }
    weka = {f"agentic_coding_weka/traces/trace_{place:04}.json": agent(place) for place in range(2)}
    if request.param == "packed":
        (tmp_path / "mooncake_fast25_partial.tar.zst").write_bytes(packed(mooncake))
        (tmp_path / "agentic_coding_weka.tar.zst").write_bytes(packed(weka))
    else:
        for name, text in {**mooncake, **weka}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", ["mooncake-conversation", "mooncake-synthetic"])
def test_only_full_blocks_of_a_request_count(folder, name):
    found = read_trace(name, folder)
    assert found.block_tokens == 512
    assert found.tokens == 1912
    assert [request.blocks.tolist() for request in found.requests] == [[0, 1], [0], []]


def test_block_numbers_of_a_conversation_are_its_own_and_shared_with_its_sub_agents(folder):
    found = read_trace("weka", folder)
    assert found.block_tokens == 64
    other = 1 << 32
    assert [r.blocks.tolist() for r in found.requests] == [[1, 2], [other + 1, other + 2], [other + 1], [1]]


def test_a_file_of_the_same_form_is_read_with_its_own_block_size(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"input_length": 40, "hash_ids": [3, 4, 5], "block_size": 16}\n')
    found = read_trace(str(file), None)
    assert (found.name, found.block_tokens) == ("mine", 16)
    assert found.requests[0].blocks.tolist() == [3, 4]


@pytest.mark.parametrize("name", ["mooncake-conversation", "weka"])
def test_a_missing_trace_is_named(tmp_path, name):
    with pytest.raises(ConfigError, match="give --data FOLDER or set RETAIN_DATA"):
        read_trace(name, None)
    with pytest.raises(ConfigError, match="holds n"):
        read_trace(name, tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_trace(name, tmp_path / "absent")


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"input_length": 3}', '{"input_length": "x", "hash_ids": []}', ""]
)
def test_a_line_that_is_no_request_is_named(tmp_path, line):
    file = tmp_path / "bad.jsonl"
    file.write_text(line + "\n" if line else "")
    with pytest.raises(
        ConfigError, match=r"line 1 of the trace bad is no request|the trace bad holds no request"
    ):
        read_trace(str(file), None)
