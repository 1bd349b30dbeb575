"""The way to one store, for threads and for asyncio. A store is a cache: every failure is a miss with a reason."""
