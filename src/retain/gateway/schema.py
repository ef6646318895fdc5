"""Requests: read strictly where a field changes the answer, leniently where it does not."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from retain.fidelity import ACCEPTABLE
from retain.gateway.refusal import Refusal

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_SALT_CHARACTERS = 512

Json = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """A request that is understood: the prompt in one of three forms, and how to answer.

    Exactly one of `messages`, `text` and `tokens` is set. `top_logprobs` None means that no log probabilities
    are wanted. `fidelity` is the lowest accepted of kept KV, None the server's. `transfer` is vLLM's
    `kv_transfer_params`: see retain.engines.handover. `ignored` names the fields that were given and have no
    meaning here.
    """

    model: str
    messages: tuple[Json, ...] | None = None
    tools: tuple[Json, ...] = ()
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    stream: bool = False
    include_usage: bool = False
    cache_salt: str | None = None
    fidelity: str | None = None
    transfer: Json | None = None
    ignored: tuple[str, ...] = ()

    @property
    def is_chat(self) -> bool:
        return self.messages is not None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Common(msgspec.Struct):
    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    cache_salt: str | None = None
    fidelity: str | None = None
    kv_transfer_params: Json | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Taken note of and without effect: the key of a block is its content, and who asks is known from the API
    # key.
    prompt_cache_key: str | None = None
    user: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[Json] | None = None
    name: str | None = None
    tool_calls: list[Json] | None = None
    tool_call_id: str | None = None


class _Chat(_Common, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    response_format: Json | None = None
    functions: list[Json] | None = None
    function_call: str | Json | None = None
    modalities: list[str] | None = None
    audio: Json | None = None
    # Accepted with no effect on the answer.
    metadata: Json | None = None
    store: bool | None = None
    parallel_tool_calls: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prediction: Json | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prompt_cache_retention: str | None = None


class _Completion(_Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


def read_chat(body: bytes) -> Ask:
    """The body of a chat completion. Raises Refusal."""
    given, unknown = _decode(body, _Chat)
    _refuse_common(given)
    if not given.messages:
        raise Refusal(400, "messages must hold at least one message", param="messages")
    for name in ("functions", "function_call", "audio"):
        if getattr(given, name) is not None:
            instead = "; use tools and tool_choice" if name.startswith("function") else ""
            raise Refusal(400, f"{name} is not supported{instead}", param=name, code="unsupported_parameter")
    if given.modalities not in (None, ["text"]):
        raise Refusal(400, 'modalities other than ["text"] are not supported', param="modalities")
    if given.response_format is not None and given.response_format.get("type") != "text":
        raise Refusal(
            400,
            f"response_format of type {given.response_format.get('type')!r} is not supported; only 'text' is",
            param="response_format",
            code="unsupported_parameter",
        )
    if given.top_logprobs is not None and not given.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    top = _within("top_logprobs", given.top_logprobs, 0, 20)
    max_tokens = given.max_completion_tokens if given.max_completion_tokens is not None else given.max_tokens
    field = "max_completion_tokens" if given.max_completion_tokens is not None else "max_tokens"
    return _ask(
        given,
        unknown,
        messages=tuple(_message(index, message) for index, message in enumerate(given.messages)),
        tools=_tools(given.tools, given.tool_choice),
        max_tokens=_within(field, max_tokens, 1, None),
        top_logprobs=(top or 0) if given.logprobs else None,
    )


def read_completion(body: bytes) -> Ask:
    """The body of a completion. Raises Refusal."""
    given, unknown = _decode(body, _Completion)
    _refuse_common(given)
    if given.echo:
        raise Refusal(400, "echo is not supported: the answer never repeats the prompt", param="echo")
    if given.best_of not in (None, 1):
        raise Refusal(400, f"best_of must be 1, got {given.best_of}", param="best_of")
    if given.suffix:
        raise Refusal(400, "suffix is not supported", param="suffix", code="unsupported_parameter")
    text, tokens = _prompt(given.prompt)
    return _ask(
        given,
        unknown,
        text=text,
        tokens=tokens,
        max_tokens=_within("max_tokens", 16 if given.max_tokens is None else given.max_tokens, 1, None),
        top_logprobs=_within("logprobs", given.logprobs, 0, 20),
    )


def read_object(body: bytes, known: tuple[str, ...]) -> Json:
    """A small JSON object, all of whose fields must be known; an empty body is {}. Raises Refusal."""
    if not body.strip():
        return {}
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad_json(error) from error
    for name in given:
        if name not in known:
            raise Refusal(400, f"unknown field {name!r}; known are {', '.join(known)}", param=name)
    return given


def _decode(body: bytes, kind: type[Any]) -> tuple[Any, tuple[str, ...]]:
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        given = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad_json(error) from error
    return given, tuple(sorted(set(fields) - {field.name for field in msgspec.structs.fields(kind)}))


_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"^Object missing required field `(\w+)`$")


def _bad_json(error: Exception) -> Refusal:
    message = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return Refusal(400, f"the body is not valid JSON: {message or 'it is nested too deeply'}")
    place = _PLACE.search(message)
    sentence = _PLACE.sub("", message)
    missing = _MISSING.match(sentence)
    if missing is not None:
        param = f"{place.group(1)}.{missing.group(1)}" if place else missing.group(1)
        return Refusal(400, f"{param} is required", param=param, code="missing_required_parameter")
    param = place.group(1) if place else None
    return Refusal(
        400, f"{param or 'the body'}: {sentence[:1].lower()}{sentence[1:]}", param=param, code="invalid_type"
    )


def _refuse_common(given: Any) -> None:
    if given.n not in (None, 1):
        raise Refusal(
            400, f"n must be 1, got {given.n}: send {given.n} requests instead, the prompt is kept", param="n"
        )
    for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
        if getattr(given, name):
            raise Refusal(
                400,
                f"{name} is not supported; leave it out or at its default",
                param=name,
                code="unsupported_parameter",
            )
    if given.stream_options is not None and not given.stream:
        raise Refusal(400, "stream_options needs stream to be true", param="stream_options")


def _ask(given: Any, unknown: tuple[str, ...], **rest: Any) -> Ask:
    temperature = _within("temperature", given.temperature, 0, 2)
    top_p = _within("top_p", given.top_p, 0, 1)
    greedy = top_p == 0  # no mass but the likeliest token's
    salt = given.cache_salt
    if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARACTERS:
        raise Refusal(
            400,
            f"cache_salt must have 1 to {MAX_SALT_CHARACTERS} characters, got {len(salt)}",
            param="cache_salt",
        )
    if given.fidelity is not None and given.fidelity not in ACCEPTABLE:
        raise Refusal(
            400,
            f"fidelity must be one of {', '.join(ACCEPTABLE)}, got {given.fidelity!r}",
            param="fidelity",
        )
    return Ask(
        model=given.model,
        temperature=0.0 if greedy else 1.0 if temperature is None else float(temperature),
        top_p=1.0 if greedy or top_p is None else float(top_p),
        seed=_within("seed", given.seed, -(2**63), 2**63 - 1),
        stop=_stops(given.stop),
        stream=bool(given.stream),
        include_usage=bool(given.stream_options and given.stream_options.include_usage),
        cache_salt=salt,
        fidelity=given.fidelity,
        transfer=given.kv_transfer_params,
        ignored=unknown,
        **rest,
    )


def _within(name: str, value: Any, low: float, high: float | None) -> Any:
    if value is not None and (value < low or (high is not None and value > high)):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise Refusal(400, f"{name} must be {bound}, got {value}", param=name, code="invalid_value")
    return value


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise Refusal(400, f"stop may hold at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
    for text in stops:
        if not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise Refusal(
                400,
                f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters, got {len(text)}",
                param="stop",
            )
    return stops


def _prompt(prompt: str | list[Any]) -> tuple[str | None, tuple[int, ...] | None]:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        text: str = prompt
        if not text:
            raise Refusal(400, "prompt must not be empty", param="prompt")
        return text, None
    if not prompt:
        raise Refusal(400, "prompt must not be empty", param="prompt")
    if not all(isinstance(token, int) for token in prompt):
        raise Refusal(
            400,
            f"prompt must be one text or one list of token ids, got a list of {len(prompt)} prompts",
            param="prompt",
        )
    return None, tuple(prompt)


_ROLES = ("system", "developer", "user", "assistant", "tool")


def _message(index: int, message: _Message) -> Json:
    place = f"messages[{index}]"
    if message.role not in _ROLES:
        raise Refusal(
            400,
            f"{place}.role must be one of {', '.join(_ROLES)}, got {message.role!r}",
            param=f"{place}.role",
        )
    if message.content is None and not message.tool_calls:
        raise Refusal(400, f"{place}.content is required", param=f"{place}.content")
    # Models know no developer: what OpenAI calls so is their system prompt.
    read: Json = {"role": "system" if message.role == "developer" else message.role}
    read["content"] = _content(place, message.content)
    if message.name is not None:
        read["name"] = message.name
    if message.tool_calls:
        read["tool_calls"] = [
            _tool_call(f"{place}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        read["tool_call_id"] = message.tool_call_id
    return read


def _content(place: str, content: str | list[Json] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if part.get("type") not in ("text", "refusal") or not isinstance(
            part.get(str(part.get("type"))), str
        ):
            raise Refusal(
                400,
                f"{place}.content[{index}]: only parts of type 'text' are read, got {part.get('type')!r}",
                param=f"{place}.content[{index}]",
            )
        texts.append(part[part["type"]])
    return "".join(texts)


def _tool_call(place: str, call: Json) -> Json:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(400, f"{place}.function.name is required", param=place)
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        # Templates are written for an object; what the model wrote and is not one stays the text that it is.
        with suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments)
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _tools(tools: list[Json] | None, choice: str | Json | None) -> tuple[Json, ...]:
    if choice not in (None, "none", "auto"):
        raise Refusal(
            400,
            f"tool_choice must be 'none' or 'auto', got {choice!r}: no model is forced to call a tool",
            param="tool_choice",
            code="unsupported_parameter",
        )
    for index, tool in enumerate(tools or ()):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise Refusal(
                400,
                f"tools[{index}] must be of type 'function' with a function.name",
                param=f"tools[{index}]",
            )
    return () if choice == "none" else tuple(tools or ())
