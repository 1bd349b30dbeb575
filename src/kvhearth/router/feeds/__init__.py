"""What engines and the store tell of the KV they hold, told on to the KV index."""

from kvhearth.router.feeds.engine import EngineFeed
from kvhearth.router.feeds.feeds import EngineEvents, Feeds
from kvhearth.router.feeds.store import StoreFeed

__all__ = ["EngineEvents", "EngineFeed", "Feeds", "StoreFeed"]
