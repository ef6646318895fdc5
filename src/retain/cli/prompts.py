"""Prompts that commands read from files: texts, or lists of token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retain.errors import ConfigError, MissingDependency

if TYPE_CHECKING:
    from retain.identity import Chain


@dataclass(frozen=True)
class Prompt:
    """One prompt: its place in words, and its text or its token ids."""

    place: str
    text: str | None = None
    tokens: tuple[int, ...] | None = None


def read_prompts(files: Sequence[Path]) -> Iterator[Prompt]:
    """The prompts of files: `.jsonl` has one a line, as a text, a list of token ids, or an object with `text`
    or `tokens`; `.json` one of these, or a list of them; any other file is one text. Raises ConfigError.
    """
    for file in files:
        try:
            text = file.read_text("utf-8")
            if file.suffix == ".jsonl":
                lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
                for number, line in lines:
                    yield _prompt(f"line {number} of {file}", json.loads(line))
            elif file.suffix == ".json":
                given = json.loads(text)
                many = isinstance(given, list) and not all(type(each) is int for each in given)
                for number, each in enumerate(given if many else [given], 1):
                    yield _prompt(f"prompt {number} of {file}", each)
            else:
                yield Prompt(str(file), text=text)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the prompts in {file} cannot be read: {error}") from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"{file} is not valid JSON: {error}") from error


def _prompt(place: str, given: Any) -> Prompt:
    if isinstance(given, dict):
        given = given.get("text", given.get("tokens"))
    if isinstance(given, str):
        return Prompt(place, text=given)
    if isinstance(given, list) and all(type(each) is int and 0 <= each < 1 << 32 for each in given):
        return Prompt(place, tokens=tuple(given))
    raise ConfigError(f"{place} is no prompt: write a text, a list of token ids, or an object with either")


class Chains:
    """Makes the chains of prompts for a model of this machine, without loading it."""

    def __init__(self, model: str, tenant: str | None, cache_salt: str | None = None) -> None:
        from retain.identity import salt_of
        from retain.models import find

        self._source = find(model)
        self._salt = salt_of(tenant, cache_salt)

    @cached_property
    def kin(self) -> bytes:
        """The kin of the model."""
        from retain.fingerprint import kin_of_files

        return kin_of_files(self._source.path)

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from retain.engines.transformers.loading import load_tokenizer
        except ImportError as error:
            raise MissingDependency(
                f"to make tokens of a text {error.name} is needed: pip install 'retain[transformers]'; "
                "or give token ids"
            ) from error
        return load_tokenizer(self._source)

    def of(self, prompt: Prompt) -> Chain:
        """The chain of a prompt, its text encoded as the server does it."""
        from retain.identity import chain, space_of

        tokens = prompt.tokens
        if tokens is None:
            tokens = self._tokenizer.encode(prompt.text, add_special_tokens=True)
        return chain(space_of(self.kin, None, self._salt), tokens)
