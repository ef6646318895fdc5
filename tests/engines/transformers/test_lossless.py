"""What the lossless codec saves on a real model's KV."""

import inspect
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch

from retain.block import make_header
from retain.codecs import codec

pytestmark = pytest.mark.engine


def test_lossless_makes_the_bf16_kv_of_smollm2_at_least_1_5_times_smaller(smollm2):
    tokens = smollm2.tokenizer.encode(inspect.getsource(textwrap))[:512]
    with torch.no_grad():
        cache = smollm2.model(input_ids=torch.tensor([tokens])).past_key_values
    arrays = {
        name: np.stack(
            [getattr(layer, field)[0].to(torch.bfloat16).view(torch.uint16).numpy() for layer in cache.layers]
        )
        for name, field in (("k", "keys"), ("v", "values"))
    }
    ids = np.array(tokens, np.uint32)
    spec = replace(smollm2.spec, dtype="bfloat16")
    header = make_header(spec, space=b"s" * 32, parent=b"p" * 32, tokens=ids, first=0)
    encoded = codec("lossless").encode(arrays, ids, header)
    streams = encoded.streams
    header = replace(header, codec="lossless", parameters=encoded.parameters)
    back = {name: np.empty_like(array) for name, array in arrays.items()}
    codec("lossless").decode(streams, ids, header, back)
    assert all(np.array_equal(back[name], arrays[name]) for name in arrays)
    ratio = sum(a.nbytes for a in arrays.values()) / sum(s.nbytes for s in streams.values())
    print(f"lossless: {ratio:.3f} times smaller")
    assert ratio >= 1.5
