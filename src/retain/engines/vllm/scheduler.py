"""The scheduler's side: finds kept prefixes, plans loads and saves, and holds pages until they are copied.

A page that is to be copied is held by a reference of Retain's own in vLLM's block pool, as another request
with the same prefix would hold it. So a request may end, be preempted or let its window move on at any time:
the pages go to someone else only when their bytes are in the cache, and nobody waits for that.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from retain.cache import Query, Selection
from retain.engines import handover
from retain.engines.kinship import Peers
from retain.identity import BLOCK_TOKENS, TAIL_TOKENS, salt_of, space_of

from . import kin, model
from .layout import Group, groups_of
from .messages import Load, Report, Save, Step
from .requests import Tracked, Whose, media_of
from .settings import Settings
from .shared import Shared
from .stopwatch import Stopwatch
from .tables import Table, cut
from .version import producer

log = logging.getLogger("vllm.retain")

LOOK_AGAIN = 1.0
"""Seconds after which a waiting request's lookup is repeated: its prefix may have been stored meanwhile."""

SHARE_HELD = 0.25
"""The share of vLLM's blocks that running requests' saves may hold; beyond it they wait for their turn."""

YIELD_SECONDS = 0.25
"""How long vLLM may wait for held blocks instead of preempting a request."""


@dataclass
class _Held:
    """A save under way: its pages by pool reference, and how many workers are done with it."""

    blocks: list[Any]
    since: float
    done: int = 0
    event: Any = None


class Scheduler:
    """The scheduler's half of the connector. All calls come from the scheduler's thread."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, shared: Shared, settings: Settings) -> None:
        self._cache = shared.cache
        self._shared = shared
        self._settings = settings
        self._groups: tuple[Group, ...] = groups_of(kv_cache_config)
        self._workers = int(vllm_config.parallel_config.world_size)
        self._spec = model.spec(vllm_config)
        self._adapters = model.Adapters()
        self._peers = Peers(producer())
        self._models = kin.Models(self._spec)
        self._requests: dict[str, Tracked] = {}
        self._loads: dict[str, Load] = {}
        self._loading: dict[str, Tracked] = {}
        self._cancelled: set[str] = set()
        self._late: list[Save] = []
        self._held: dict[int, _Held] = {}
        self._held_blocks = 0
        self._open: dict[str, list[Any]] = {}
        self._jobs = 0
        self._clear_behind = 0
        self._pool: Any = None
        # A producer hands its prompts over whole; others keep tails that are cheap to find and share.
        role = vllm_config.kv_transfer_config.kv_role
        self._tail = 1 if role == "kv_producer" else TAIL_TOKENS
        self._narrow = any(group.window is not None and group.window < BLOCK_TOKENS for group in self._groups)
        self._stopwatch = Stopwatch(shared.cache.planner)
        self.events: deque[Any] | None = None
        if vllm_config.kv_events_config is not None and vllm_config.kv_events_config.enable_kv_cache_events:
            self.events = deque()
            self._hash_tokens = int(kv_cache_config.hash_block_size or vllm_config.cache_config.block_size)

    def bind(self, pool: Any) -> None:
        """Learn vLLM's block pool."""
        self._pool = pool

    def arrived(self) -> None:
        """A new request came: perhaps after a pause, in which workers of this very process went on."""
        worker = self._shared.worker
        if worker is not None:
            self._stopwatch.cancel()
            self.reported((), worker.report())

    # what is found

    def matched(self, request: Any, computed: int) -> int | None:
        """How many tokens behind the `computed` that vLLM holds can be loaded; None: ask again."""
        tracked = self._track(request)
        if tracked is None or tracked.loading:
            return 0
        wanted = tracked.tokens - 1  # the last token is computed in any case
        if not tracked.reads or tracked.failed or request.skip_reading_prefix_cache or wanted <= computed:
            tracked.release()
            return 0
        awaited = handover.findable(min(wanted, tracked.awaited(self._cache.planner)))
        stale = time.monotonic() - tracked.looked_at > (handover.LOOK_SECONDS if awaited else LOOK_AGAIN)
        if tracked.looked_for != wanted or stale:
            chain = tracked.chain()
            query = Query(chain, tracked.whose.spec, fidelity=self._settings.fidelity, limit=wanted)
            hit = kin.find(self._cache, query, self._peers, tracked, self._models, plan=self._settings.plan)
            tracked.found(hit, wanted)
        if tracked.hit is not None and tracked.hit.found < awaited:
            return None
        tracked.start = computed
        found = self._usable(tracked)
        if found <= computed:
            tracked.release()
            return 0
        return found - computed

    def allocated(self, request: Any, tables: tuple[Sequence[int], ...], external: int) -> None:
        """vLLM gave a request its blocks; `external` tokens behind those it held are to be loaded."""
        name = request.request_id
        tracked = self._requests.get(name)
        if external <= 0:
            if tracked is not None and not tracked.loading:
                tracked.release()
                tracked.looked_for = 0  # should it be preempted, it is looked up anew
            return
        # From here on vLLM waits for this load: it is sent whatever happens, and fails if it must.
        start = int(request.num_computed_tokens) if tracked is None else tracked.start
        ticket, resident, number = b"", False, 0
        try:
            if tracked is not None and tracked.hit is not None:
                ticket = tracked.hit.ticket()
                resident = all(kind == "memory" for kind in tracked.hit.tokens_by_tier)
                number = tracked.whose.number if tracked.reads_as is None else tracked.reads_as
        except Exception as error:
            self._cache.failure("a hit could not be handed to vLLM's workers", error)
        cuts = self._tables(tables, start, start + external)
        self._loads[name] = Load(name, ticket, number, start, start + external, resident, cuts)
        if tracked is not None:
            tracked.loading = True
            self._loading[name] = tracked

    def sources(self, request: Any, external: int) -> dict[str, int]:
        """By kind of tier, where a request's `external` tokens come from."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.hit is None:
            return {}
        # What vLLM holds itself is the first part, which lies in the fastest tier more often than not.
        skip = tracked.start
        found: dict[str, int] = {}
        for kind, tokens in tracked.hit.tokens_by_tier.items():
            used = max(0, tokens - skip)
            skip -= tokens - used
            used = min(used, external - sum(found.values()))
            if used:
                found[kind] = found.get(kind, 0) + used
        return found

    # what each step does

    def plan(self, output: Any) -> Step:
        """The workers' part of a step that was just scheduled."""
        step = Step(idle=output.total_num_scheduled_tokens == 0)
        step.models = self._models.new()
        step.loads, self._loads = list(self._loads.values()), {}
        step.cancelled, self._cancelled = self._cancelled, set()
        step.saves, self._late = self._late, []
        try:
            self._plan_saves(output, step.saves)
            self._stopwatch.start(output, self._requests)
        except Exception as error:  # the loads above must reach the workers
            self._cache.failure("saves could not be planned", f"{type(error).__name__}: {error}")
        return step

    def _plan_saves(self, output: Any, saves: list[Save]) -> None:
        for name in output.preempted_req_ids or ():
            self._let_go(name)
            if name in self._requests:
                self._requests[name].seen = []
        if not self._settings.store:
            return
        for name, count in output.num_scheduled_tokens.items():
            tracked = self._requests.get(name)
            if tracked is not None and tracked.stores:
                self._advance(tracked, name, count, output, saves)

    def finished(self, request: Any, tables: tuple[Sequence[int], ...]) -> int:
        """A request has ended; its blocks are about to be freed. How many of its first tokens are kept, or
        on their way.
        """
        tracked = self._requests.pop(request.request_id, None)
        try:
            return 0 if tracked is None else self._finish(tracked, tables)
        finally:
            self._let_go(request.request_id)

    def reported(self, received: Iterable[str], report: Report | None) -> None:
        """What the workers finished."""
        self._stopwatch.stop()
        failed = report.failed if report is not None else set()
        for name in failed:
            tracked = self._loading.get(name)
            if tracked is not None:
                tracked.failed = True
                tracked.next = 0
        for name in received:
            tracked = self._loading.pop(name, None)
            if tracked is not None:
                tracked.loading = False
                tracked.release()
                tracked.looked_for = 0
        if report is not None:
            self._settle(report)

    @property
    def busy(self) -> bool:
        """Whether steps are needed, though no request is left, to finish what was begun."""
        return bool(self._late or self._held or self._cancelled)

    @property
    def yields(self) -> bool:
        """Whether blocks will be free soon, so that nobody need be preempted for them."""
        now = time.monotonic()
        return any(now - held.since < YIELD_SECONDS for held in self._held.values())

    def reset(self) -> bool:
        """Forget what was kept of this model in every tier, also what is still on its way there; what other
        engines keep stays.
        """
        if not self._settings.clear_on_reset:
            return True
        for tracked in self._requests.values():
            if not tracked.loading:
                tracked.release()
            # What it has computed so far may be what the reset is about: of weights that are replaced now.
            tracked.stores = False
        self._clear_behind = self._jobs if self._held else 0
        worker = self._shared.worker
        if worker is not None:
            worker.flush(10.0)
        removed = self._cache.remove(Selection(variant=self._spec.variant))
        log.info("vLLM's prefix cache was reset: %d kept objects were removed", removed.objects)
        if self.events is not None:
            from vllm.distributed.kv_events import AllBlocksCleared

            self.events.append(AllBlocksCleared())
        return True

    # inside

    def _finish(self, tracked: Tracked, tables: tuple[Sequence[int], ...]) -> int:
        request = tracked.request
        if tracked.loading:
            # Aborted: its blocks stay until the load has ended, and what is in them is not known.
            self._cancelled.add(request.request_id)
            return 0
        tracked.release()
        if not self._settings.store or not tracked.stores:
            return 0
        computed = int(request.num_computed_tokens) - int(request.num_in_flight_tokens)
        stop = self._storable(tracked, computed)
        saves: list[Save] = []
        tables = tuple(tracked.remember(tables)) if self._narrow else tables
        while (tracked.next + 1) * BLOCK_TOKENS <= stop:
            self._add(saves, tracked, tables, BLOCK_TOKENS)
        kept = tracked.next * BLOCK_TOKENS
        tail = 1 if handover.asked(request.kv_transfer_params) else self._tail
        count = (stop - kept) // tail * tail
        if self._settings.store_tails and count > 0:
            kept += count
            self._add(saves, tracked, tables, count)
        worker = self._shared.worker
        if worker is not None and worker.immediate and not self._models.untold:
            worker.start_saves(saves)  # no further step may come for a while
        else:
            self._late.extend(saves)
        return kept

    def _track(self, request: Any) -> Tracked | None:
        name = request.request_id
        tracked = self._requests.get(name)
        if tracked is None and name not in self._requests:
            whose = self._whose(request)
            if whose is None:
                return None
            sampling = request.sampling_params
            needs_prompt = sampling is not None and sampling.prompt_logprobs is not None
            tracked = Tracked(
                request,
                whose,
                media_of(request),
                reads=self._settings.load and not needs_prompt,
                stores=self._settings.store,
            )
            self._requests[name] = tracked
        return tracked

    def _whose(self, request: Any) -> Whose | None:
        """What the request's KV belongs to; None where that cannot be told, or nothing may be skipped."""
        if request.pooling_params is not None or request.prompt_embeds is not None:
            return None
        if request.prompt_token_ids is None or request.prompt_is_token_ids is not None:
            return None
        spec, adapter = self._spec, None
        if request.lora_request is not None:
            adapter = self._adapters.digest(request.lora_request)
            if adapter is None:
                return None
            spec = model.with_adapter(self._spec, adapter)
        number = self._models.number(adapter, spec)
        salt = salt_of(self._settings.tenant, request.cache_salt)
        space = space_of(spec.kin, spec.adapter, salt)
        if self._settings.tenant is not None:
            self._cache.own(space, self._settings.tenant)
        return Whose(number, spec, space)

    def _usable(self, tracked: Tracked) -> int:
        """How many of a request's first tokens can be loaded; notes which of its blocks are kept already."""
        hit = tracked.hit
        if hit is None:
            return 0
        whole = sum(part.key == key for part, key in zip(hit.parts, tracked.keys, strict=False))
        tracked.next = max(tracked.next, whole, hit.found // BLOCK_TOKENS)
        if self._narrow and hit.tokens > whole * BLOCK_TOKENS:
            # A block that is begun by a load and completed by computing could not be stored: a window of less
            # than a block gets no pages for its beginning. Then no later block would be found either.
            return whole * BLOCK_TOKENS
        return hit.tokens

    def _storable(self, tracked: Tracked, computed: int) -> int:
        """How many first tokens have KV that is theirs: drafts, which may be rejected, lie behind these."""
        stop = min(computed, tracked.tokens)
        if not self._settings.store_generated:
            stop = min(stop, int(tracked.request.num_prompt_tokens))
        return max(0, stop)

    def _advance(self, tracked: Tracked, name: str, count: int, output: Any, saves: list[Save]) -> None:
        """Plan the saves of the blocks that this step completes."""
        stop = self._storable(tracked, int(tracked.request.num_computed_tokens) + count)
        if (tracked.next + 1) * BLOCK_TOKENS > stop and not self._narrow:
            return
        tables: Sequence[Sequence[int]] | None = output.kv_connector_block_state.get_block_ids(name)
        if tables is None:
            return
        if self._narrow:
            tables = tracked.remember(tables)
        while (tracked.next + 1) * BLOCK_TOKENS <= stop:
            if self._held and self._held_blocks > SHARE_HELD * self._pool.num_gpu_blocks:
                break  # they stay the request's own as long as it runs: later steps will do
            self._add(saves, tracked, tables, BLOCK_TOKENS)
        if self._narrow:
            self._hold_open(tracked, name, tables, stop)

    def _add(self, saves: list[Save], tracked: Tracked, tables: Sequence[Sequence[int]], count: int) -> None:
        """Plan the save of the request's next block, or of its first `count` tokens, and hold its pages."""
        index = tracked.next
        first = index * BLOCK_TOKENS
        cuts = self._tables(tables, first, first + count)
        tracked.next += 1
        ids = tracked.ids(first, first + count)
        tracked.reach(index)
        if not all(table.covers(first, first + count) for table in cuts):
            self._cache.count("uncaptured_blocks")
            return
        self._jobs += 1
        blocks = self._touch(cuts)
        self._held[self._jobs] = _Held(blocks, time.monotonic(), event=self._event(tracked, first, count))
        self._held_blocks += len(blocks)
        saves.append(
            Save(
                self._jobs,
                tracked.whose.number,
                tracked.whose.space,
                tracked.parent(index),
                ids.astype("<u4", copy=False).tobytes(),
                first,
                tracked.media,
                cuts,
            )
        )

    def _tables(self, tables: Sequence[Sequence[int]], start: int, stop: int) -> tuple[Table, ...]:
        return tuple(
            cut(ids, group.block_tokens, start, stop) for ids, group in zip(tables, self._groups, strict=True)
        )

    def _touch(self, tables: Iterable[Table]) -> list[Any]:
        blocks = [self._pool.blocks[block] for table in tables for block in table.ids.tolist() if block]
        self._pool.touch(blocks)
        return blocks

    def _hold_open(self, tracked: Tracked, name: str, tables: Sequence[Sequence[int]], stop: int) -> None:
        """Keep the pages of the block that is not complete yet, where a window would let go of them."""
        first = tracked.next * BLOCK_TOKENS
        held = self._touch(self._tables(tables, first, stop)) if stop > first else []
        self._let_go(name)
        if held:
            self._open[name] = held

    def _let_go(self, name: str) -> None:
        blocks = self._open.pop(name, None)
        if blocks:
            self._pool.free_blocks(reversed(blocks))

    def _settle(self, report: Report) -> None:
        for job, count in report.saved.items():
            held = self._held.get(job)
            if held is None:
                continue
            held.done += count
            if held.done >= self._workers:
                del self._held[job]
                self._held_blocks -= len(held.blocks)
                self._pool.free_blocks(reversed(held.blocks))
                if held.event is not None and self.events is not None:
                    self.events.append(held.event)
        if self._clear_behind and not any(job <= self._clear_behind for job in self._held):
            self._clear_behind = 0
            self._cache.remove(Selection(variant=self._spec.variant))

    def _event(self, tracked: Tracked, first: int, count: int) -> Any:
        """The event that tells others, such as a router, that these tokens' KV can be had here."""
        if self.events is None:
            return None
        from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        request, size = tracked.request, self._hash_tokens
        low, high = first // size, (first + count) // size
        hashes = [maybe_convert_block_hash(each) for each in request.block_hashes[low:high]]
        if not hashes:
            return None
        lora = request.lora_request
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=maybe_convert_block_hash(request.block_hashes[low - 1]) if low else None,
            token_ids=tracked.ids(low * size, high * size).tolist(),
            block_size=size,
            lora_id=lora.lora_int_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.lora_name if lora else None,
        )
