"""Loading a model and its tokenizer into torch, from files of this machine alone.

A GGUF file is converted once into a directory in the cache, named by its content: transformers would need 20
seconds for a small model at every start. Weights that were digested before are known by their files, and not
read again for it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from retain.digests import DigestCache, cache_directory, content_of, identity_of, settled
from retain.errors import MissingDependency, UnsupportedModel
from retain.gguf import GgufFile
from retain.model import ModelSpec
from retain.models import Source, find
from retain.weights import weight_files

# Read by huggingface_hub when it is imported. Every call below asks for local files only; this also stops
# libraries that look for news of a model by themselves.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

try:
    import torch
    import transformers
    from safetensors.numpy import save_file
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging
except ImportError as error:
    raise MissingDependency(
        f"loading a model needs torch and transformers ({error}): pip install 'retain[transformers]'"
    ) from error

from retain.engines.transformers.identity import WeightDigests, spec_of, weight_digests

log = logging.getLogger("retain.models")

DTYPES = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16})
_CONVERSION = "1"  # part of a converted directory's name: to be raised when the conversion changes


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, its tokenizer, and what it is."""

    model: Any
    tokenizer: Any
    spec: ModelSpec


def load(
    source: Source | str,
    dtype: str = "float32",
    attention: str = "sdpa",
    *,
    cache: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Loaded:
    """Load a model for inference in `dtype` (float32, bfloat16 or float16), with transformers' `attention`
    kernel.

    `cache` is where a converted GGUF file and known digests are kept, by default Retain's cache directory.
    `progress` is told in one line of what takes more than a moment. Raises UnsupportedModel, ConfigError.
    """
    if dtype not in DTYPES:
        raise UnsupportedModel(f"a model cannot be loaded in {dtype!r}; known are {', '.join(DTYPES)}")
    found = find(source) if isinstance(source, str) else source
    place = cache or cache_directory()
    known = DigestCache(place / "digests.json")
    directory = found.path
    if found.kind == "gguf":
        directory = converted(found, place, known, progress or log.info)
    files = weight_files(directory)
    identity = identity_of((*files, directory / "config.json"), *_versions(dtype))
    trusted = settled((*files, directory / "config.json"))
    with _quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=DTYPES[dtype],
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model.eval()
    kept = known.get(identity)
    if kept is not None and kept.keys() == {"kin", "weights"}:
        digests = WeightDigests(**kept)
    else:
        digests = weight_digests(model)
        # Only when the files are still those that were read.
        if trusted and identity == identity_of((*files, directory / "config.json"), *_versions(dtype)):
            known.put(identity, {"kin": digests.kin, "weights": digests.weights})
    return Loaded(model, tokenizer, spec_of(model, found.name, digests))


def prepared(source: Source | str, *, cache: Path | None = None) -> Path:
    """The directory of a model as other engines read it: config, weights, tokenizer; a GGUF file is
    converted.
    """
    found = find(source) if isinstance(source, str) else source
    if found.kind != "gguf":
        return found.path
    place = cache or cache_directory()
    return converted(found, place, DigestCache(place / "digests.json"), log.info)


def load_tokenizer(source: Source | str, *, cache: Path | None = None) -> Any:
    """The tokenizer alone; that of a GGUF file is converted if it was not before, its weights are not."""
    found = find(source) if isinstance(source, str) else source
    directory = found.path
    if found.kind == "gguf":
        place = cache or cache_directory()
        name = _converted_name(found, DigestCache(place / "digests.json"))
        directory = place / "models" / name
        if not _is_converted(directory):
            directory = place / "tokenizers" / name
            if not (directory / "tokenizer.json").is_file():
                _make_whole(directory, lambda made: _write_tokenizer(GgufFile(found.path), made))
    with _quiet():
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def converted(source: Source, cache: Path, known: DigestCache, progress: Callable[[str], None]) -> Path:
    """The directory with the model of a GGUF file: config, tokenizer, and dequantised float32 weights.

    Its name is the digest of the file's content, so a changed file is converted anew. It appears whole or not
    at all.
    """
    directory = cache / "models" / _converted_name(source, known)
    if _is_converted(directory):
        return directory
    started = time.perf_counter()
    progress(f"converting {source.path.name} once for transformers ...")
    gguf = GgufFile(source.path)

    def write(made: Path) -> None:
        _write_model(gguf, made)
        _write_tokenizer(gguf, made)

    _make_whole(directory, write)
    progress(
        f"converted {source.path.name} in {time.perf_counter() - started:.1f} s; it is kept in {directory}"
    )
    return directory


def _converted_name(source: Source, known: DigestCache) -> str:
    return f"{source.name}-{content_of(source.path, known)[:12].hex()}-{_CONVERSION}"


def _is_converted(directory: Path) -> bool:
    return (directory / "model.safetensors").is_file() and (directory / "tokenizer.json").is_file()


def _make_whole(directory: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a folder, which then appears as `directory`."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        write(made)
        if directory.exists():
            shutil.rmtree(directory)
        try:
            made.rename(directory)
        except OSError:  # another process was as quick, and made the same
            if not directory.is_dir():
                raise


def _write_model(gguf: GgufFile, directory: Path) -> None:
    tensors = {name: tensor.read() for name, tensor in gguf.tensors().items()}
    config = gguf.config()
    generation = {
        name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config
    }
    ends = [gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    stops = list(dict.fromkeys(end for end in ends if end is not None))
    if len(stops) > 1:
        generation["eos_token_id"] = stops
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2))
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(gguf: GgufFile, directory: Path) -> None:
    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(
            gguf.path.parent, gguf_file=gguf.path.name, local_files_only=True
        )
    fixed = _PRE_TOKENIZERS.get(str(gguf.metadata.get("tokenizer.ggml.pre", "")))
    if fixed is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = fixed()
    tokenizer.save_pretrained(directory)


def _smollm() -> Any:
    # llama.cpp splits off every digit before the regex of GPT-2; transformers knows only the regex.
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


_PRE_TOKENIZERS: MappingProxyType[str, Callable[[], Any]] = MappingProxyType({"smollm": _smollm})
"""How llama.cpp splits text before merging, by `tokenizer.ggml.pre`, where transformers does it
differently."""


def _versions(dtype: str) -> tuple[str, ...]:
    # transformers may fuse or rename weights as it loads them, and does so differently from release to
    # release.
    return ("weights", dtype, transformers.__version__, importlib.metadata.version("torch"))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and warnings, which speak of steps the user did not ask for."""
    settings: Any = transformers_logging
    level, bars = settings.get_verbosity(), settings.is_progress_bar_enabled()
    settings.set_verbosity_error()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        settings.set_verbosity(level)
        if bars:
            settings.enable_progress_bar()
