"""The shared KV store: a RESP server over preallocated DRAM (`server`), and its client (`client`)."""
