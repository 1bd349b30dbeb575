"""What both ends of a connection hold each other to."""

from __future__ import annotations

MAX_KEY_BYTES = 512
"""A key has 1 to so many bytes."""

DEFAULT_USER = "default"
"""Who a password without a user is of, as in Redis."""
