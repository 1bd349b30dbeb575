"""Where values live below the store's DRAM: a folder (`disk`) or an object store (`objects`), each behind `port.Tier`.

Nothing is re-exported here, so that the disk tier works where the object store's client is not installed.
"""
