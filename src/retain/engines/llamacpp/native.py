"""llama.cpp's model and context, as far as Retain calls them: decode, logits, and a sequence's state.

Every call is checked here before it is made: llama.cpp ends the process where it is given what it does not
expect. A context is used by one thread at a time.
"""

from __future__ import annotations

import ctypes
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from retain.errors import UnsupportedModel

from .state import TYPES, Array, file_version

Logits = npt.NDArray[np.float32]

PARTIAL = 1
"""llama.h's LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: of a sequence's caches the sliding one alone."""

_FLASH = MappingProxyType({True: 1, False: 0})
_quiet: Any = None
_ERROR = 4
"""ggml.h's GGML_LOG_LEVEL_ERROR."""

log = logging.getLogger("retain.llamacpp")


class NativeModel:
    """The weights of a GGUF file, in llama.cpp."""

    def __init__(self, path: Path) -> None:
        """Raises UnsupportedModel where llama.cpp does not load the file."""
        _silence()
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        # With AMX, llama.cpp loads the configuration of the tiles once a thread. Where it is lost meanwhile,
        # as on a virtual machine it was seen to be, the next tile instruction ends the process.
        parameters.use_extra_bufts = b"AMX_INT8 = 1" not in llama_cpp.llama_print_system_info()
        self._model: Any = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)
        if not self._model:
            raise UnsupportedModel(f"llama.cpp cannot load {path.name}; its own tools may tell why")
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self.vocabulary = int(llama_cpp.llama_vocab_n_tokens(self._vocabulary))
        self.trained_context = int(llama_cpp.llama_model_n_ctx_train(self._model))
        self.window = int(llama_cpp.llama_model_n_swa(self._model))
        if llama_cpp.llama_model_is_recurrent(self._model) or llama_cpp.llama_model_is_hybrid(self._model):
            self.close()
            raise UnsupportedModel(f"{path.name} keeps a recurrent state, of which no prefix can be restored")
        if llama_cpp.llama_model_has_encoder(self._model):
            self.close()
            raise UnsupportedModel(f"{path.name} has an encoder; Retain serves causal language models")

    @property
    def handle(self) -> Any:
        return self._model

    def ends(self, token: int) -> bool:
        """Whether a token ends an answer."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocabulary, token))

    def close(self) -> None:
        """Let the weights go. Idempotent; no context of the model may be used afterwards."""
        model, self._model = self._model, None
        if model:
            llama_cpp.llama_model_free(model)


class NativeContext:
    """Sequences 0 .. sequences - 1 of one model, each of up to `tokens` tokens, in one unified cache."""

    def __init__(
        self,
        model: NativeModel,
        *,
        tokens: int,
        sequences: int,
        dtype: str,
        flash: bool,
        threads: int,
        batch: int,
    ) -> None:
        """Raises UnsupportedModel where llama.cpp makes no such context."""
        _check_parameters()
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = tokens
        parameters.n_seq_max = sequences
        parameters.n_batch = parameters.n_ubatch = batch
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.type_k = parameters.type_v = TYPES[dtype][0]
        parameters.flash_attn_type = _FLASH[flash]
        parameters.kv_unified = True
        parameters.offload_kqv = False
        parameters.no_perf = True
        # Only so much of sliding layers as attention sees; the rows that leave are captured before.
        parameters.swa_full = False
        self._model = model
        self._context: Any = llama_cpp.llama_init_from_model(model.handle, parameters)
        if not self._context:
            raise UnsupportedModel(
                f"llama.cpp makes no context of {tokens} tokens with {dtype} KV"
                f"{' and flash attention' if flash else ''} for this model"
            )
        self._memory = llama_cpp.llama_get_memory(self._context)
        self.tokens = int(llama_cpp.llama_n_ctx(self._context))
        self.sequences = sequences
        self.batch = batch
        self._batch: Any = llama_cpp.llama_batch_init(batch, 0, 1)

    def decode(self, sequence: int, tokens: Sequence[int] | Array, first: int, keep: int) -> Logits:
        """Run tokens at positions `first` onwards, at most `batch`; the logits `[keep, vocabulary]` of the
        last `keep`. Raises RuntimeError where llama.cpp cannot."""
        count = len(tokens)
        self._check(sequence)
        if not 1 <= count <= self.batch or not 0 <= keep <= count or first < 0:
            raise ValueError(f"{count} tokens at {first}, {keep} to keep: at most {self.batch} at a time")
        ids = np.asarray(tokens, np.int64)
        if int(ids.min()) < 0 or int(ids.max()) >= self._model.vocabulary:
            raise ValueError(f"token ids must lie in 0 .. {self._model.vocabulary - 1}")
        if self.length(sequence) != first:
            raise ValueError(f"the sequence holds {self.length(sequence)} tokens, not {first}")
        if first + count > self.tokens:
            raise ValueError(f"{first + count} tokens do not fit a context of {self.tokens}")
        batch = self._batch
        batch.n_tokens = count
        for index, token in enumerate(ids.tolist()):
            batch.token[index] = token
            batch.pos[index] = first + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = index >= count - keep
        code = llama_cpp.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama.cpp could not run {count} tokens at {first} (code {code})")
        logits = np.empty((keep, self._model.vocabulary), np.float32)
        for row in range(keep):
            found = llama_cpp.llama_get_logits_ith(self._context, count - keep + row)
            logits[row] = np.ctypeslib.as_array(found, shape=(self._model.vocabulary,))
        return logits

    def length(self, sequence: int) -> int:
        """How many tokens a sequence holds, from position 0."""
        self._check(sequence)
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def clear(self, sequence: int) -> None:
        """Forget a sequence."""
        self._check(sequence)
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def share(self, source: int, target: int, first: int, last: int) -> None:
        """Have `target` hold positions first .. last - 1 of `source` too: cells are shared, not copied."""
        self._check(source)
        self._check(target)
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, first, last)

    def get_state(self, sequence: int, *, sliding: bool = False) -> Array:
        """A sequence's state as bytes; of the sliding cache alone where asked. Raises RuntimeError."""
        self._check(sequence)
        flags = PARTIAL if sliding else 0
        size = int(llama_cpp.llama_state_seq_get_size_ext(self._context, sequence, flags))
        buffer = np.empty(size, np.uint8)
        got = llama_cpp.llama_state_seq_get_data_ext(self._context, _pointer(buffer), size, sequence, flags)
        if not size or got != size:
            raise RuntimeError(f"llama.cpp gave {got} of {size} bytes of a sequence's state")
        return buffer

    def set_state(self, sequence: int, state: Array) -> bool:
        """Replace a sequence by a state; False, and an empty sequence, where llama.cpp did not take all of
        it. The state must have been made for this context: see retain.engines.llamacpp.state."""
        self._check(sequence)
        took = int(
            llama_cpp.llama_state_seq_set_data_ext(self._context, _pointer(state), state.size, sequence, 0)
        )
        if took != state.size:
            self.clear(sequence)
            return False
        return True

    def file_version(self, sequence: int) -> int:
        """The version that this build writes into state files. Raises UnsupportedModel."""
        self._check(sequence)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state"
            self.save_file(sequence, str(path))
            with path.open("rb") as file:
                return file_version(file.read(8))

    def save_file(self, sequence: int, path: str) -> None:
        """Write llama.cpp's own file of a sequence. Raises RuntimeError."""
        self._check(sequence)
        tokens = (llama_cpp.llama_token * 1)(0)
        if not llama_cpp.llama_state_seq_save_file(self._context, os.fsencode(path), sequence, tokens, 1):
            raise RuntimeError(f"llama.cpp could not write {path}")

    def load_file(self, sequence: int, path: str) -> bool:
        """Restore a sequence from a file that this very context wrote."""
        self._check(sequence)
        tokens, count = (llama_cpp.llama_token * 1)(0), ctypes.c_size_t()
        return bool(
            llama_cpp.llama_state_seq_load_file(
                self._context, os.fsencode(path), sequence, tokens, 1, ctypes.byref(count)
            )
        )

    def close(self) -> None:
        """Free the context. Idempotent."""
        context, self._context = self._context, None
        if context:
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(context)

    def _check(self, sequence: int) -> None:
        if not self._context:
            raise RuntimeError("the context is closed")
        if not 0 <= sequence < self.sequences:
            raise ValueError(f"there are {self.sequences} sequences, none with number {sequence}")


def version() -> str:
    """The release of llama-cpp-python."""
    return str(llama_cpp.__version__)


def _pointer(buffer: Array) -> Any:
    return buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _check_parameters() -> None:
    """Raise UnsupportedModel unless the library's parameters lie where the package expects them: builds of
    one season differ by a field."""
    found = llama_cpp.llama_context_default_params()
    told = (found.offload_kqv, found.no_perf, found.op_offload, found.swa_full, found.type_k, found.type_v)
    if told != (True, True, True, True, 1, 1):
        raise UnsupportedModel(
            f"llama.cpp's library does not fit llama-cpp-python {version()}: its defaults read {told}"
        )


def _silence() -> None:
    """Have llama.cpp tell its errors to Python's log, and the rest to nobody."""
    global _quiet  # noqa: PLW0603  the callback must outlive every model
    if _quiet is None:
        _quiet = llama_cpp.llama_log_callback(_told)
        llama_cpp.llama_log_set(_quiet, None)


def _told(level: int, text: bytes, data: Any) -> None:
    if level == _ERROR:
        log.warning("llama.cpp: %s", text.decode("utf-8", "replace").strip())
