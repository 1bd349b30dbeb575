"""Who holds which KV blocks, learnt from engines' KV events and the store's feed."""

from kvhearth.routing.index.events import Medium, StoredBlocks
from kvhearth.routing.index.index import KvIndex

__all__ = ["KvIndex", "Medium", "StoredBlocks"]
