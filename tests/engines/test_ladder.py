"""The ladder's decoder on a device of torch's gives what the one on the CPU gives."""

from __future__ import annotations

import numpy as np
import pytest

from retain.codecs.ladder import coder
from retain.errors import InvalidObject
from retain.model import DTYPES
from tests.codecs.profiles import GEOMETRIES, block_like, profile_like, spec_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gqa", "layers of two shapes", "partial rotary", "interleaved pairs"])
def test_a_device_decodes_as_the_cpu_does(name: str, dtype: str, device: str) -> None:
    from retain.engines.ladder import DeviceDecoder

    spec = spec_of(GEOMETRIES[name], dtype)
    profile = profile_like(spec)
    decoder = DeviceDecoder(profile, torch.device(device))
    for first, count, position in ((0, 40, None), (0, 3, 9), (64, 32, None), (64, 32, 5)):
        block = block_like(spec, count, first)
        places = {"dtype": dtype, "first": first}
        streams = coder.encode(profile, block.arrays, block.tokens, "near", **places)
        out = {n: np.empty_like(a) for n, a in block.arrays.items()}
        coder.decode(profile, streams, block.tokens, "near", out, position=position, **places)
        found = decoder.decode(streams, block.tokens, "near", position=position, **places)
        assert found.keys() == out.keys()
        for array, numbers in out.items():
            wanted = torch.from_numpy(numbers.view(np.int16) if dtype == "bfloat16" else numbers)
            wanted = wanted.view(torch.bfloat16) if dtype == "bfloat16" else wanted
            near = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 0.15}[dtype]
            assert (found[array].cpu().float() - wanted.float()).abs().max() < near


def test_a_device_refuses_damaged_streams_as_the_cpu_does() -> None:
    from retain.engines.ladder import DeviceDecoder

    spec = spec_of(GEOMETRIES["gqa"])
    profile = profile_like(spec)
    block = block_like(spec, 32)
    streams = coder.encode(profile, block.arrays, block.tokens, "tiny", dtype="float32", first=0)
    decoder = DeviceDecoder(profile, torch.device("cpu"))
    for name in streams:
        for bad in ({n: s for n, s in streams.items() if n != name}, streams | {name: streams[name][:-1]}):
            with pytest.raises(InvalidObject):
                decoder.decode(bad, block.tokens, "tiny", dtype="float32", first=0)
