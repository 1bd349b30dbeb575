"""Requests that wait for an engine with room: how many may, who is next, and who has waited in vain.

Pure bookkeeping: it opens no sockets, reads no clock, and leaves answering clients to its owner.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

from kvhearth.router.heap import Heap
from kvhearth.router.turns import Turns

MOST_IDLE_MODELS = 64
"""Models that nobody waits for of which is remembered who was served."""
RATE_SECONDS = 10.0
"""Time constant of the rate at which tickets of a model are taken."""
LONGEST_ESTIMATE_SECONDS = 3600.0


class Ticket:
    """One request that waits."""

    __slots__ = ("deadline", "model", "owner", "priority", "tenant", "tokens", "weight")

    def __init__(
        self, owner: Any, model: str, tenant: str, priority: int, weight: float, tokens: int, deadline: float
    ) -> None:
        self.owner = owner
        self.model = model
        self.tenant = tenant
        self.priority = priority
        self.weight = weight
        self.tokens = tokens
        self.deadline = deadline

    def __repr__(self) -> str:
        return f"Ticket({self.model!r}, {self.tenant!r}, priority={self.priority}, tokens={self.tokens})"


class _Rate:
    """How fast tickets of a model are taken, told at intervals."""

    __slots__ = ("_seconds", "_since", "_taken", "taken")

    def __init__(self) -> None:
        self.taken = 0
        """Since the last look."""
        self._since: float | None = None
        self._taken = 0.0
        self._seconds = 0.0

    def look(self, now: float, *, any_wait: bool) -> None:
        """Count what was taken since the last look, if somebody waited then and now."""
        if any_wait and self._since is not None:
            kept = math.exp((self._since - now) / RATE_SECONDS)
            self._taken = self._taken * kept + max(0, self.taken)
            self._seconds = self._seconds * kept + now - self._since
        self.taken = 0
        self._since = now if any_wait else None

    def seconds_for(self, tickets: int) -> float:
        """Until so many are taken; 0 where nothing is known."""
        if not self._seconds or not tickets:
            return 0.0
        return min(tickets * self._seconds / max(self._taken, 1e-9), LONGEST_ESTIMATE_SECONDS)


class _Hall:
    """Those who wait for one model."""

    __slots__ = ("rate", "turns")

    def __init__(self) -> None:
        self.turns = Turns()
        self.rate = _Rate()


class _Party:
    """A tenant's tickets, whatever their model."""

    __slots__ = ("lines", "waiting", "weight")

    def __init__(self) -> None:
        self.waiting = 0
        self.weight = 0.0
        self.lines: dict[int, OrderedDict[Ticket, None]] = {}  # by priority, the oldest first


class WaitingRoom:
    """Requests that wait for an engine of their model: by priority, and within one priority fairly between tenants.

    Fair is by tokens over weight (see `turns`). Who wakes a ticket calls `served` before it asks for the next one.
    """

    def __init__(self, most_requests: int) -> None:
        self.most_requests = most_requests
        self._waiting = 0
        self._halls: dict[str, _Hall] = {}
        self._idle_halls: OrderedDict[str, _Hall] = OrderedDict()  # the least recently used first
        self._parties: dict[str, _Party] = {}
        self._weights = 0.0  # of all parties
        self._crowds: dict[int, Heap[str, float]] = {}  # by priority: tenants, who has most tickets over weight first
        self._deadlines: Heap[Ticket, float] = Heap()
        self._displaced: list[Ticket] = []

    def __len__(self) -> int:
        return self._waiting

    def waiting_of(self, tenant: str) -> int:
        """Tickets of a tenant, whatever their model."""
        party = self._parties.get(tenant)
        return 0 if party is None else party.waiting

    def waiting_for(self, model: str) -> int:
        """Tickets for a model."""
        hall = self._halls.get(model)
        return 0 if hall is None else len(hall.turns)

    def models(self) -> list[str]:
        """Models that somebody waits for."""
        return [model for model, hall in self._halls.items() if hall.turns]

    def add(self, ticket: Ticket, most_of_tenant: int) -> str:
        """Let a request wait: "" when it does, else "full" or "tenant_full".

        In a full room a tenant with less than its fair share takes the place of the newest ticket of the tenant that
        has most, if that is not of higher priority: see `displaced`.
        """
        if self.waiting_of(ticket.tenant) >= most_of_tenant:
            return "tenant_full"
        if self._waiting >= self.most_requests:
            victim = self._victim(ticket)
            if victim is None:
                return "full"
            self.remove(victim)
            self._displaced.append(victim)
        self._hall(ticket.model).turns.add(ticket)
        self._enter(ticket)
        return ""

    def displaced(self) -> list[Ticket]:
        """Tickets that lost their place to others since the last call."""
        displaced, self._displaced = self._displaced, []
        return displaced

    def next(self, model: str) -> Ticket | None:
        """Take out the ticket whose turn it is; call `served`, or `put_back`, before the next one is asked for."""
        hall = self._halls.get(model)
        ticket = None if hall is None else hall.turns.next()
        if hall is None or ticket is None:
            return None
        hall.rate.taken += 1
        self._leave(ticket)
        return ticket

    def put_back(self, ticket: Ticket) -> None:
        """Its turn came but no engine would take it: it is first again."""
        hall = self._hall(ticket.model)
        hall.rate.taken -= 1
        hall.turns.add(ticket, first=True)
        self._enter(ticket, first=True)

    def remove(self, ticket: Ticket) -> bool:
        """Take out a ticket whose client has left; False when it is not in."""
        if ticket not in self._deadlines:
            return False
        self._halls[ticket.model].turns.remove(ticket)
        self._leave(ticket)
        return True

    def expired(self, now: float) -> list[Ticket]:
        """Take out all whose deadline has passed, the earliest first. Called at intervals, it measures rates too."""
        late = []
        while self._deadlines and self._deadlines.smallest() <= now:
            ticket = self._deadlines.first()
            self.remove(ticket)
            late.append(ticket)
        for hall in self._halls.values():
            hall.rate.look(now, any_wait=len(hall.turns) > 0)
        return late

    def served(self, tenant: str, weight: float, tokens: int, model: str | None = None) -> None:
        """A request has gone to an engine, whether it has waited or not; without ``model`` it counts at every model."""
        halls = self._halls.values() if model is None else (self._hall(model),)
        for hall in halls:
            hall.turns.served(tenant, weight, tokens)

    def estimated_wait_seconds(self, model: str) -> float:
        """Until all who wait now have been taken, by how fast it went lately; 0 where nothing is known."""
        hall = self._halls.get(model)
        return 0.0 if hall is None else hall.rate.seconds_for(len(hall.turns))

    def remembered(self) -> int:
        """Entries that are kept for tenants and models; tests bound it."""
        return len(self._parties) + sum(1 + hall.turns.remembered for hall in self._halls.values())

    def _hall(self, model: str) -> _Hall:
        hall = self._halls.get(model)
        if hall is None:
            hall = self._halls[model] = self._idle_halls[model] = _Hall()
            self._forget_halls()
        elif model in self._idle_halls:
            self._idle_halls.move_to_end(model)
        return hall

    def _forget_halls(self) -> None:
        while len(self._idle_halls) > MOST_IDLE_MODELS:
            model, _ = self._idle_halls.popitem(last=False)
            del self._halls[model]

    def _enter(self, ticket: Ticket, *, first: bool = False) -> None:
        self._waiting += 1
        self._idle_halls.pop(ticket.model, None)
        self._deadlines.put(ticket, ticket.deadline)
        party = self._parties.get(ticket.tenant)
        if party is None:
            party = self._parties[ticket.tenant] = _Party()
        self._weights += ticket.weight - party.weight
        party.weight = ticket.weight
        line = party.lines.setdefault(ticket.priority, OrderedDict())
        line[ticket] = None
        if first:
            line.move_to_end(ticket, last=False)
        party.waiting += 1
        self._rank(ticket.tenant, party)

    def _leave(self, ticket: Ticket) -> None:
        self._waiting -= 1
        self._deadlines.drop(ticket)
        party = self._parties[ticket.tenant]
        party.waiting -= 1
        line = party.lines[ticket.priority]
        del line[ticket]
        if not line:
            del party.lines[ticket.priority]
            self._crowds[ticket.priority].drop(ticket.tenant)
            if not self._crowds[ticket.priority]:
                del self._crowds[ticket.priority]
        self._rank(ticket.tenant, party)
        if not party.waiting:
            del self._parties[ticket.tenant]
            self._weights = self._weights - party.weight if self._parties else 0.0
        hall = self._halls[ticket.model]
        if not hall.turns:
            self._idle_halls[ticket.model] = hall
            self._forget_halls()

    def _rank(self, tenant: str, party: _Party) -> None:
        for priority in party.lines:
            crowd = self._crowds.get(priority)
            if crowd is None:
                crowd = self._crowds[priority] = Heap()
            crowd.put(tenant, -party.waiting / party.weight)

    def _victim(self, ticket: Ticket) -> Ticket | None:
        """Who makes place in a full room: the newest of who has most over weight, if the newcomer will have less."""
        party = self._parties.get(ticket.tenant)
        waiting, counted = (0, 0.0) if party is None else (party.waiting, party.weight)
        weights = self._weights - counted + ticket.weight
        if waiting >= self.most_requests * ticket.weight / weights:
            return None
        most, victim = (waiting + 1) / ticket.weight, None
        for priority in sorted(self._crowds):
            crowd = self._crowds[priority]
            if priority <= ticket.priority and -crowd.smallest() > most:
                most, victim = -crowd.smallest(), next(reversed(self._parties[crowd.first()].lines[priority]))
        return victim
