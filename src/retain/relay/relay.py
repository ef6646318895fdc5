"""The relay's two steps: have a prompt prefilled where that pays and can be done, then have it answered."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from retain.gateway.refusal import Refusal, unavailable
from retain.relay.answer import Answer, read_whole
from retain.relay.ask import Ask
from retain.relay.metrics import Meter
from retain.relay.upstream import BUSY, ServerFailed, Upstream

log = logging.getLogger("retain.relay")


@dataclass(frozen=True)
class Limits:
    """What the relay waits for, and how much it takes on.

    `min_prompt`: tokens below which a prompt is left to the decode server, which computes it along with what
    it does anyway, while a hand-over costs a second request and a load. `prefill_seconds` bounds the prefill
    step as a whole, `decode_seconds` the silence before and within an answer: so a client has an answer or an
    error at most `prefill_seconds + decode_seconds` after it asked or last heard something.
    """

    min_prompt: int = 256
    prefill_seconds: float = 60.0
    decode_seconds: float = 300.0
    requests: int = 256


class Relay:
    """The servers in their roles. `running` requests are inside."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], limits: Limits, client: httpx.AsyncClient
    ) -> None:
        self.limits = limits
        self.prefillers = [Upstream(url, "prefill", client) for url in prefill]
        self.decoders = [Upstream(url, "decode", client) for url in decode]
        self.running = 0
        self.meter = Meter(lambda: self.running, self.servers)

    @property
    def servers(self) -> list[Upstream]:
        return [*self.prefillers, *self.decoders]

    async def serve(self, ask: Ask, answer: Answer, *, prefilled: bool = True) -> None:
        """Answer a request. Raises Refusal; where the answer has begun by then, it ends with it."""
        handed = await self._prefill(ask) if prefilled else None
        await self._decode(ask, ask.for_decode(handed), answer)

    async def _prefill(self, ask: Ask) -> dict[str, Any] | None:
        """Have the prompt prefilled; what is handed over with it. Whatever fails here is left to the decode
        server.
        """
        if why := self._no_prefill(ask):
            self.meter.prefilled(why)
            return None
        began = time.monotonic()
        body = ask.for_prefill()
        servers = least_busy(self.prefillers)
        if not servers:
            self.meter.prefill_failed("down")
        for server in servers:
            left = began + self.limits.prefill_seconds - time.monotonic()
            try:
                async with server.ask(ask, body, left, left) as response:
                    told = await read_whole(response)
                    if response.status_code == 200:
                        self.meter.prefilled("done", time.monotonic() - began)
                        return _handed(told)
                    reason = "busy" if response.status_code in BUSY else "rejected"
            except ServerFailed as error:
                log.info("%s; the decode server computes the prompt if no other does", error)
                reason = error.reason
            self.meter.prefill_failed(reason)
            if reason in ("rejected", "timeout"):
                break  # another would say the same, or there is no time left
        self.meter.prefilled("failed", time.monotonic() - began)
        return None

    def _no_prefill(self, ask: Ask) -> str | None:
        if ask.transfer.get("do_remote_prefill") or ask.transfer.get("do_remote_decode"):
            return "handed"  # another relay is before this one
        if ask.needs_whole_prompt:
            return "whole"
        return "short" if ask.prompt_tokens < self.limits.min_prompt else None

    async def _decode(self, ask: Ask, body: bytes, answer: Answer) -> None:
        until = time.monotonic() + self.limits.decode_seconds
        servers = least_busy(self.decoders)
        failure: Refusal | None = None
        for server in servers:
            left = until - time.monotonic()
            if left <= 0:
                break
            try:
                async with server.ask(ask, body, left) as response:
                    if response.status_code in BUSY and server is not servers[-1]:
                        self.meter.decode_failed("busy")
                        continue
                    await answer.take(response)
                    return
            except ServerFailed as error:
                self.meter.decode_failed(error.reason)
                log.warning("%s", error)
                failure = Refusal(error.status, f"No answer: {error}.", code="decode_failed")
                if answer.begun:
                    break
        if failure is None:
            reasons = "; ".join(each.remote.health().reason for each in self.decoders)
            raise unavailable(f"No decode server is up: {reasons}.", 1)
        raise failure


def least_busy(servers: Sequence[Upstream]) -> list[Upstream]:
    """The servers that are up, in the order to try them. Among idle ones always the first, whose own caches
    are the warmest.
    """
    return sorted((each for each in servers if each.remote.up), key=lambda each: each.running)


class _Told(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


def _handed(told: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(told, type=_Told).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
