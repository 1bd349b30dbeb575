"""Whose turn it is at one model: start-time fair queueing over tokens (Goyal, Vin and Cheng, SIGCOMM 1996).

A tenant's start tag is the virtual time at which its next request begins; what it is served moves the tag on by tokens
over weight, and the lowest tag of the highest priority is next. It does not know deadlines or how many may wait.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvhearth.router.heap import Heap

if TYPE_CHECKING:
    from kvhearth.router.waiting import Ticket

Line = OrderedDict["Ticket", None]
"""One tenant's tickets of one priority, the oldest first."""

MOST_REMEMBERED = 1024
"""Tenants of a model that do not wait and of which is known that they are ahead of others."""


class Account:
    """A tenant at one model."""

    __slots__ = ("lines", "start")

    def __init__(self) -> None:
        self.start = 0.0
        self.lines: dict[int, Line] = {}


class Turns:
    """Those who wait for one model, and what tenants have been served there."""

    __slots__ = ("_accounts", "_idle", "_levels", "_virtual", "_waiting")

    def __init__(self) -> None:
        self._virtual = 0.0  # the highest start tag of what was served
        self._waiting = 0
        self._accounts: dict[str, Account] = {}
        self._idle: OrderedDict[str, Account] = OrderedDict()  # those without tickets, the least recently served first
        self._levels: dict[int, Heap[str, float]] = {}  # by priority: tenants by start tag

    def __len__(self) -> int:
        return self._waiting

    @property
    def remembered(self) -> int:
        """Tenants of which anything is kept."""
        return len(self._accounts)

    def add(self, ticket: Ticket, *, first: bool = False) -> None:
        """Last of its tenant; or first, and its tenant first of those that have been served as much."""
        account = self._account(ticket.tenant)
        line = account.lines.get(ticket.priority)
        if line is None:
            self._advance(ticket.tenant, account, self._floor(ticket.priority))
            line = account.lines[ticket.priority] = OrderedDict()
            self._idle.pop(ticket.tenant, None)
            level = self._levels.get(ticket.priority)
            if level is None:
                level = self._levels[ticket.priority] = Heap()
            level.put(ticket.tenant, account.start, ahead=first)
        line[ticket] = None
        if first:
            line.move_to_end(ticket, last=False)
        self._waiting += 1

    def next(self) -> Ticket | None:
        """Take out the ticket whose turn it is. It counts for fairness when it is `served`."""
        if not self._levels:
            return None
        priority = max(self._levels)
        account = self._accounts[self._levels[priority].first()]
        ticket = next(iter(account.lines[priority]))
        self.remove(ticket)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Take out a ticket that is in."""
        account = self._accounts[ticket.tenant]
        line = account.lines[ticket.priority]
        del line[ticket]
        self._waiting -= 1
        if line:
            return
        del account.lines[ticket.priority]
        level = self._levels[ticket.priority]
        level.drop(ticket.tenant)
        if not level:
            del self._levels[ticket.priority]
        if not account.lines:
            self._idle[ticket.tenant] = account
            self._forget()

    def served(self, tenant: str, weight: float, tokens: int) -> None:
        """A request of the tenant has gone to an engine, whether it has waited or not."""
        account = self._account(tenant)
        if not account.lines:
            account.start = max(account.start, self._floor(None))
            self._idle.move_to_end(tenant)
        self._virtual = max(self._virtual, account.start)
        self._advance(tenant, account, account.start + max(1, tokens) / weight)
        self._forget()

    def _account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = self._idle[tenant] = Account()
        return account

    def _advance(self, tenant: str, account: Account, start: float) -> None:
        if start > account.start:
            account.start = start
            for priority in account.lines:
                self._levels[priority].put(tenant, start)

    def _floor(self, priority: int | None) -> float:
        """The start tag of one who comes now: virtual time, but behind nobody who waits already (of that priority)."""
        levels = (level for key, level in self._levels.items() if priority is None or key == priority)
        return min(self._virtual, min((level.smallest() for level in levels), default=math.inf))

    def _forget(self) -> None:
        """Drop those who would start no later if nothing were known of them, and the oldest of too many."""
        idle, floor = self._idle, self._floor(None)
        while idle:
            tenant, account = next(iter(idle.items()))
            if account.start > floor and len(idle) <= MOST_REMEMBERED:
                return
            del idle[tenant], self._accounts[tenant]
