"""The ladder as codecs: one a level, each promising at least its quality whatever the block holds.

How an object's streams are coded stands in its header's `parameters`: `profile=` and the profile's digest;
`int8` where no profile fits the block; `lossless` where its numbers are not finite or too large.
"""

from __future__ import annotations

from collections.abc import Mapping

from retain.codecs.base import Array, Encoded
from retain.codecs.ladder import coder
from retain.codecs.ladder.int8 import Int8
from retain.codecs.ladder.measured import is_switched_off
from retain.codecs.ladder.profile import Profile
from retain.codecs.ladder.quantise import Unencodable
from retain.codecs.ladder.shelf import profile_for, profile_of
from retain.codecs.lossless import Lossless
from retain.errors import InvalidObject
from retain.header import BlockHeader
from retain.identity import Tokens
from retain.model import Slice

BY_PROFILE = "profile="


class Rung:
    """One level of the ladder."""

    lossy = True

    def __init__(self, level: str) -> None:
        self.name = level

    def encode(self, arrays: Mapping[str, Array], tokens: Tokens, header: BlockHeader) -> Encoded:
        profile = None if is_switched_off(header.kin, self.name) else profile_for(header.kin)
        if profile is None or not fits(profile, header):
            return Int8().encode(arrays, tokens, header)
        try:
            streams = coder.encode(profile, arrays, tokens, self.name, dtype=header.dtype, first=header.first)
        except Unencodable:
            return Encoded(Lossless().encode(arrays, tokens, header).streams, Lossless.name)
        return Encoded(streams, f"{BY_PROFILE}{profile.digest.hex()}", exact=False)

    def decode(
        self,
        streams: Mapping[str, Array],
        tokens: Tokens,
        header: BlockHeader,
        out: Mapping[str, Array],
        position: int | None = None,
    ) -> None:
        """As every codec; `position` is where keys are to be rotated to, by default the block's own.

        Raises MissingProfile where the profile that the header names is not here.
        """
        if not header.parameters.startswith(BY_PROFILE):
            if position not in (None, header.first):
                raise InvalidObject("a block coded without a profile cannot be decoded at another position")
            Int8().decode(streams, tokens, header, out)
            return
        profile = profile_of(_digest(header.parameters))
        if not fits(profile, header):
            raise InvalidObject("the object names the profile of a model with other layers")
        coder.decode(
            profile,
            streams,
            tokens,
            self.name,
            out,
            dtype=header.dtype,
            first=header.first,
            position=position,
        )


def fits(profile: Profile, header: BlockHeader) -> bool:
    """Whether a profile can code a block: it is of the model's layers, and the block is whole."""
    return profile.layers == header.layers and header.slice == Slice(0, len(header.layers))


def _digest(parameters: str) -> bytes:
    text = parameters.removeprefix(BY_PROFILE)
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != 32 or digest.hex() != text:
        raise InvalidObject(f"the object names the impossible profile {text[:80]!r}")
    return digest
