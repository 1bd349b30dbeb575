"""A prompt's token ids, as the engine will make them."""

from kvhearth.router.tokens.ids import TokenIds
from kvhearth.router.tokens.tokens import Tokens

__all__ = ["TokenIds", "Tokens"]
