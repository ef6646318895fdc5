"""Selecting: which kept blocks a call is about that removes or pins them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from retain.identity import TAIL_TOKENS, Chain, Tokens

from .find import common_length, rest_of
from .tenants import Tenants
from .tier import Tier


@dataclass(frozen=True)
class Prefix:
    """The first tokens of prompts, as digests: the keys of their full blocks, `root` being the parent of the
    first, and the token ids (u32le) behind the last. With `beyond`, everything that continues them as well.
    """

    keys: tuple[bytes, ...]
    root: bytes
    rest: bytes = b""
    beyond: bool = True

    @classmethod
    def of(cls, chain: Chain, *, beyond: bool = True) -> Prefix:
        return cls(chain.keys, chain.root, rest_of(chain), beyond)

    @property
    def last(self) -> bytes:
        """The key that what lies behind the full blocks has as its parent."""
        return self.keys[-1] if self.keys else self.root

    def takes(self, tokens: Tokens) -> bool:
        """Whether a block behind the last full one begins with the rest, or would be a hit for it in part."""
        rest = np.frombuffer(self.rest, "<u4")
        common = common_length(rest, tokens)
        if self.beyond:
            return common >= min(rest.size, TAIL_TOKENS)
        return common >= TAIL_TOKENS and common == tokens.size


@dataclass(frozen=True)
class Selection:
    """Blocks for which all that is said here holds; nothing said means all blocks.

    `kin` and `variant` are digests of a model, `tenant` is a name, `older_than` the seconds since a block was
    stored in the tier, `tier` the kind or name of a tier.
    """

    keys: tuple[bytes, ...] | None = None
    prefix: Prefix | None = None
    space: bytes | None = None
    kin: bytes | None = None
    variant: bytes | None = None
    tenant: str | None = None
    older_than: float | None = None
    tier: str | None = None

    @property
    def by_header(self) -> bool:
        """Whether the headers of objects have to be known to tell."""
        return any(each is not None for each in (self.prefix, self.space, self.kin, self.tenant))

    @property
    def everything(self) -> bool:
        """Whether all blocks are meant, of all tiers or of one."""
        said = (self.keys, self.prefix, self.space, self.kin, self.variant, self.tenant, self.older_than)
        return all(each is None for each in said)


def chosen_slots(tier: Tier, which: Selection, keys: Collection[bytes] | None) -> list[int]:
    """The slots of a tier that a selection may be about; `keys` are those it comes down to, if any."""
    if keys is not None:
        return [slot for key in keys for slot in tier.same_key(key)]
    return tier.slots(which.space)


def matcher(tier: Tier, which: Selection, tenants: Tenants) -> Callable[[int], bool]:
    """Whether what lies in a slot of a tier is selected, keys apart; for use with the tier's lock held."""
    whose: dict[bytes, bool] = {}

    def matches(slot: int) -> bool:
        if which.variant is not None and tier.form(slot).variant != which.variant[:16]:
            return False
        if which.older_than is not None and tier.ages.age(slot) < which.older_than:
            return False
        if which.space is None and which.kin is None and which.tenant is None:
            return True
        space = tier.space(slot)
        if which.space not in (None, space) or which.kin not in (None, tenants.kin(space)):
            return False
        if which.tenant is None:
            return True
        if space not in whose:
            whose[space] = tenants.belongs(space, which.tenant)
        return whose[space]

    return matches
