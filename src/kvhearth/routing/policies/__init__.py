"""The policies, one a file. They share the border in `routing.ports`, `least_loaded`'s two words about load, and that
`kv_aware` falls back on `prefix`."""
