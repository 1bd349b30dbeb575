"""The shared KV store. `server` serves, from `dram` and the `tiers` below it; `policies` say what goes first; `client`
and `ring` ask, by the `protocol` that both sides know. `open` is the way in for whoever wants a store, or a ring.
"""
