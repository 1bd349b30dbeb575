"""One tenant at work: what it has under way, and whether it may have more."""

from __future__ import annotations

import math
from collections import Counter
from fnmatch import fnmatchcase

from kvhearth.router import replies
from kvhearth.router.tenants.bucket import Bucket
from kvhearth.router.tenants.spec import TenantSpec

_LONGEST_RETRY_SECONDS = 3600


class Tenant:
    """Counts its requests and tokens. ``salt`` keeps its group's KV apart; "" for the common group."""

    def __init__(self, spec: TenantSpec, salt: str, now: float) -> None:
        self.in_flight = 0
        self.tokens: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self._requests = Bucket(spec.requests_per_minute, now)
        self._tokens = Bucket(spec.tokens_per_minute, now)
        self.follow(spec, salt, now)

    def follow(self, spec: TenantSpec, salt: str, now: float) -> None:
        """The file says something else of it; what it has under way stays. A changed rate begins with a full minute."""
        self.spec = spec
        self.name = spec.name
        self.priority = spec.priority
        self.weight = spec.weight
        self.max_waiting = spec.max_waiting
        self.salt = salt
        if self._requests.per_minute != spec.requests_per_minute:
            self._requests = Bucket(spec.requests_per_minute, now)
        if self._tokens.per_minute != spec.tokens_per_minute:
            self._tokens = Bucket(spec.tokens_per_minute, now)

    def __repr__(self) -> str:
        return f"Tenant({self.name!r})"

    def may_use(self, model: str) -> bool:
        """Whether its patterns allow that name."""
        return any(pattern == "*" or fnmatchcase(model, pattern) for pattern in self.spec.models)

    def admit(self, now: float, prompt_tokens: int) -> replies.Reply | None:
        """Take a request in and count it; or why not, and nothing is counted. `ended` is to follow one taken in."""
        most = self.spec.max_concurrency
        if most is not None and self.in_flight >= most:
            return self._limited(now, "tenant_concurrency", f"more than {most} requests at once", 1.0)
        for code, bucket, amount, what in (
            ("requests_per_minute", self._requests, 1, "requests"),
            ("tokens_per_minute", self._tokens, prompt_tokens, "tokens"),
        ):
            wait = bucket.wait_seconds(amount, now)
            if wait == math.inf:
                self.outcomes["too_large"] += 1
                message = f"{amount} tokens are more than this key may use in a minute ({bucket.per_minute})"
                return replies.error(400, message, "too_many_tokens", param="prompt")
            if wait:
                return self._limited(now, code, f"more than {bucket.per_minute} {what} a minute", wait)
        self._requests.take(1, now)
        self._tokens.take(prompt_tokens, now)
        self.in_flight += 1
        self.outcomes["admitted"] += 1
        self.tokens["prompt"] += prompt_tokens
        return None

    def ended(self, now: float, completion_tokens: int) -> None:
        """A request that was taken in is over; its answer counts too."""
        self.in_flight -= 1
        self.tokens["completion"] += completion_tokens
        self._tokens.take(completion_tokens, now)

    def turned_away(self, now: float, prompt_tokens: int) -> None:
        """A request that was taken in found no engine and no place to wait: it costs nothing."""
        self.in_flight -= 1
        self.outcomes["turned_away"] += 1
        self.tokens["prompt"] -= prompt_tokens
        self._tokens.take(-prompt_tokens, now)

    def _limited(self, now: float, code: str, what: str, wait_seconds: float) -> replies.Reply:
        self.outcomes[code] += 1
        wait = max(1, math.ceil(min(wait_seconds, _LONGEST_RETRY_SECONDS)))
        return replies.error(
            429,
            f"this key's limit is reached: {what}",
            "rate_limit_exceeded" if code != "tenant_concurrency" else code,
            retry_after_seconds=wait,
            extra=self._rate_lines(now),
        )

    def _rate_lines(self, now: float) -> bytes:
        lines = b""
        for what, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket.per_minute is not None:
                left = max(0, int(bucket.remaining(now)))
                lines += b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %d\r\n" % (
                    what,
                    bucket.per_minute,
                    what,
                    left,
                )
        return lines
