"""The waiting room: whose turn it is, who may come in, and that nobody is lost, against a model that is not clever."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvhearth.router.turns import MOST_REMEMBERED
from kvhearth.router.waiting import MOST_IDLE_MODELS, Ticket, WaitingRoom

PLENTY = 1 << 30


def ticket(
    tenant: str = "a",
    *,
    model: str = "m",
    priority: int = 0,
    weight: float = 1.0,
    tokens: int = 100,
    deadline: float = 1e9,
) -> Ticket:
    return Ticket(None, model, tenant, priority, weight, tokens, deadline)


def filled(room: WaitingRoom, *tickets: Ticket) -> list[Ticket]:
    for one in tickets:
        assert room.add(one, PLENTY) == ""
    return list(tickets)


def take(room: WaitingRoom, model: str = "m") -> Ticket:
    """The next one goes to an engine."""
    taken = room.next(model)
    assert taken is not None
    room.served(taken.tenant, taken.weight, taken.tokens, model)
    return taken


# Order


def test_a_tenants_requests_go_in_the_order_they_came() -> None:
    room = WaitingRoom(10)
    tickets = filled(room, *(ticket(tokens=tokens) for tokens in (300, 1, 200)))
    assert [take(room) for _ in tickets] == tickets
    assert room.next("m") is None


def test_a_higher_priority_goes_first_whatever_its_tenant_was_served() -> None:
    room = WaitingRoom(10)
    room.served("b", 1.0, 1_000_000, "m")
    low, high = filled(room, ticket("a"), ticket("b", priority=1))
    assert [take(room), take(room)] == [high, low]


def test_one_who_no_engine_would_take_is_first_again() -> None:
    room = WaitingRoom(10)
    tickets = filled(room, ticket("a"), ticket("a"), ticket("b"), ticket("b"))
    order = []
    while room:
        turn = room.next("m")
        assert turn is not None
        for _ in range(3):
            room.put_back(turn)
            assert room.next("m") is turn
        room.put_back(turn)
        order.append(take(room))
        assert order[-1] is turn
    assert sorted(map(id, order)) == sorted(map(id, tickets))


def test_models_wait_apart() -> None:
    room = WaitingRoom(10)
    first, second = filled(room, ticket(model="m"), ticket(model="n"))
    assert room.models() == ["m", "n"]
    assert (room.waiting_for("m"), room.waiting_for("n"), room.waiting_of("a")) == (1, 1, 2)
    assert take(room, "n") is second
    assert room.models() == ["m"]
    assert take(room, "m") is first
    assert room.next("unheard of") is None


def test_what_a_tenant_was_served_at_one_model_is_not_held_against_it_at_another() -> None:
    room = WaitingRoom(10)
    for _ in range(100):
        room.served("a", 1.0, 1000, "n")
    tickets = filled(room, ticket("a"), ticket("b"))
    assert [take(room), take(room)] == tickets


# Fairness


def test_a_thousand_requests_of_a_greedy_tenant_delay_another_by_one() -> None:
    room = WaitingRoom(2000)
    filled(room, *(ticket("greedy") for _ in range(1000)))
    for _ in range(100):
        take(room)
    (modest,) = filled(room, ticket("modest"))
    assert modest in (take(room), take(room))


def test_service_received_without_waiting_counts() -> None:
    room = WaitingRoom(10)
    for _ in range(5):
        room.served("greedy", 1.0, 100, "m")
        room.served("modest", 1.0, 10, "m")
    greedy, modest = filled(room, ticket("greedy"), ticket("modest"))
    assert [take(room), take(room)] == [modest, greedy]


def test_service_without_waiting_counts_from_now_on_even_after_a_long_silence() -> None:
    room = WaitingRoom(10)
    for _ in range(100):
        room.served("busy", 1.0, 100, "m")
    room.served("served", 1.0, 100, "m")
    served, new = filled(room, ticket("served"), ticket("new"))
    assert [take(room), take(room)] == [new, served]


def test_requests_without_tokens_count_too() -> None:
    room = WaitingRoom(100)
    filled(room, *(ticket("empty", tokens=0) for _ in range(50)))
    (other,) = filled(room, ticket("other", tokens=0))
    assert other in (take(room), take(room))


def test_one_who_asks_again_only_when_answered_gets_no_more_than_one_with_many_requests() -> None:
    """Also while others of lower priority wait and get nothing."""
    room = WaitingRoom(100)
    filled(room, ticket("low"), *(ticket("many", priority=1) for _ in range(40)), ticket("single", priority=1))
    turns = Counter[str]()
    for _ in range(20):
        turn = take(room)
        turns[turn.tenant] += 1
        if turn.tenant == "single":
            filled(room, ticket("single", priority=1))
    assert abs(turns["many"] - turns["single"]) <= 1


def test_service_counts_at_every_model_where_none_is_named() -> None:
    room = WaitingRoom(10)
    filled(room, ticket("c"))
    room.served("greedy", 1.0, 1000)
    take(room)
    greedy, modest = filled(room, ticket("greedy"), ticket("modest"))
    assert [take(room), take(room)] == [modest, greedy]


def test_an_idle_tenant_gets_no_credit_for_the_past() -> None:
    room = WaitingRoom(1000)
    room.served("late", 1.0, 100, "m")
    filled(room, *(ticket("busy") for _ in range(200)))
    for _ in range(100):
        take(room)
    filled(room, *(ticket("late") for _ in range(100)))
    turns = Counter(take(room).tenant for _ in range(20))
    assert abs(turns["busy"] - turns["late"]) <= 2


def test_twice_the_weight_is_twice_the_tokens() -> None:
    room = WaitingRoom(1000)
    filled(room, *(ticket("a", weight=2.0, tokens=50) for _ in range(300)))
    filled(room, *(ticket("b", weight=1.0, tokens=200) for _ in range(300)))
    tokens: Counter[str] = Counter()
    for _ in range(150):
        taken = take(room)
        tokens[taken.tenant] += taken.tokens
    assert tokens["a"] / 2 == pytest.approx(tokens["b"], abs=225)


REQUESTS = st.lists(st.integers(1, 1000), min_size=1, max_size=30)
WEIGHTS = st.sampled_from([0.5, 1.0, 2.0, 3.0])


@given(REQUESTS, REQUESTS, WEIGHTS, WEIGHTS, st.data())
def test_two_who_always_wait_differ_by_one_request_of_each(
    of_a: list[int], of_b: list[int], weight_a: float, weight_b: float, data: st.DataObject
) -> None:
    """Tokens over weight, in any stretch of time, whatever others do meanwhile (Goyal, Vin and Cheng, theorem 1)."""
    room = WaitingRoom(PLENTY)
    left = {"a": iter(of_a), "b": iter(of_b)}
    weights = {"a": weight_a, "b": weight_b}
    lead = [0.0]
    others = st.sampled_from(["add", "serve", "nothing"])
    for tenant in data.draw(st.permutations(["a", "b", "a", "b"])):
        filled(
            room,
            *(ticket(tenant, weight=weights[tenant], tokens=tokens) for tokens in itertools.islice(left[tenant], 1)),
        )
    while room.waiting_of("a") and room.waiting_of("b"):
        for what in data.draw(st.lists(others, max_size=2)):
            name, tokens = data.draw(st.sampled_from("cd")), data.draw(st.integers(1, 1000))
            if what == "add":
                filled(room, ticket(name, tokens=tokens))
            elif what == "serve":
                room.served(name, 1.0, tokens, "m")
        turn = take(room)
        if turn.tenant in left:
            lead.append(lead[-1] + (1 if turn.tenant == "a" else -1) * turn.tokens / turn.weight)
            for tokens in itertools.islice(left[turn.tenant], 1):
                filled(room, ticket(turn.tenant, weight=turn.weight, tokens=tokens))
    assert max(lead) - min(lead) <= max(of_a) / weight_a + max(of_b) / weight_b + 1e-6


def test_under_three_times_the_load_a_tenant_within_its_share_gets_everything() -> None:
    """Sixteen slots of half a second, 32 requests/s; for a minute 80 come from one tenant and 16 from another."""
    room = WaitingRoom(1024)
    slots, served = [0.0] * 16, Counter[str]()
    for tick in range(60 * 80):
        now = tick / 80
        room.expired(now)
        for tenant in ("greedy", "modest") if tick % 5 == 0 else ("greedy",):
            room.add(ticket(tenant, deadline=now + 5), 256)
        for number, free in enumerate(slots):
            if free <= now and room:
                served[take(room).tenant] += 1
                slots[number] = now + 0.5
    assert served["modest"] >= 0.99 * 60 * 16
    assert served.total() >= 0.98 * 60 * 32


# A full room


def test_a_full_room_takes_nobody_of_a_tenant_that_has_its_share() -> None:
    room = WaitingRoom(2)
    filled(room, ticket("a"), ticket("a"))
    assert room.add(ticket("a"), PLENTY) == "full"
    assert room.displaced() == []


def test_a_tenant_has_its_own_bound() -> None:
    room = WaitingRoom(10)
    assert room.add(ticket("a"), 1) == ""
    assert room.add(ticket("a", model="n"), 1) == "tenant_full"
    assert room.add(ticket("b"), 1) == ""


def test_a_greedy_tenant_cannot_keep_others_out() -> None:
    room = WaitingRoom(4)
    tickets = filled(room, *(ticket("greedy") for _ in range(4)))
    filled(room, ticket("modest"))
    assert room.displaced() == tickets[3:]
    assert room.displaced() == []
    filled(room, ticket("modest"))
    assert room.displaced() == tickets[2:3]
    assert room.add(ticket("modest"), PLENTY) == "full"
    assert room.add(ticket("greedy"), PLENTY) == "full"
    assert len(room) == 4


def test_tenants_that_have_left_have_no_share() -> None:
    room = WaitingRoom(4)
    filled(room, ticket("greedy"))
    for gone in filled(room, ticket("x"), ticket("y"), ticket("z")):
        room.remove(gone)
    filled(room, *(ticket("greedy") for _ in range(3)), ticket("modest"), ticket("modest"))
    assert len(room.displaced()) == 2


def test_a_tenant_that_has_its_share_displaces_nobody() -> None:
    room = WaitingRoom(9)
    filled(room, *(ticket(tenant) for tenant in "aaaaabbbc"))
    assert room.add(ticket("b"), PLENTY) == "full"
    assert room.add(ticket("c"), PLENTY) == ""


def test_one_who_was_put_back_is_not_the_newest() -> None:
    room = WaitingRoom(3)
    tickets = filled(room, *(ticket("greedy") for _ in range(3)))
    turn = room.next("m")
    assert turn is tickets[0]
    room.put_back(turn)
    filled(room, ticket("modest"))
    assert room.displaced() == tickets[2:]


def test_nobody_is_displaced_by_a_lower_priority() -> None:
    room = WaitingRoom(2)
    filled(room, ticket("a", priority=1), ticket("a", priority=1))
    assert room.add(ticket("b", priority=0), PLENTY) == "full"
    assert room.add(ticket("b", priority=1), PLENTY) == ""
    assert len(room.displaced()) == 1


def test_the_share_of_the_room_is_by_weight() -> None:
    room = WaitingRoom(9)
    filled(room, *(ticket("heavy", weight=2.0) for _ in range(5)), *(ticket("light") for _ in range(4)))
    assert room.add(ticket("heavy", weight=2.0), PLENTY) == ""
    assert [one.tenant for one in room.displaced()] == ["light"]
    assert room.add(ticket("heavy", weight=2.0), PLENTY) == "full"
    assert room.add(ticket("light"), PLENTY) == "full"


# Leaving


def test_a_client_that_left_is_not_called() -> None:
    room = WaitingRoom(10)
    first, second = filled(room, ticket(), ticket())
    assert room.remove(first)
    assert not room.remove(first)
    assert take(room) is second
    assert not room.remove(second)
    assert not room.remove(ticket())


def test_those_whose_deadline_has_passed_are_told_the_earliest_first() -> None:
    room = WaitingRoom(10)
    late, later, not_yet = filled(room, ticket(deadline=2.0), ticket(deadline=1.0), ticket(deadline=3.0))
    assert room.expired(0.5) == []
    assert room.expired(2.0) == [later, late]
    assert room.expired(2.0) == []
    assert take(room) is not_yet


def test_the_wait_is_estimated_by_how_fast_it_went_lately() -> None:
    room = WaitingRoom(1000)
    filled(room, *(ticket() for _ in range(200)))
    assert room.estimated_wait_seconds("m") == 0.0
    assert room.estimated_wait_seconds("n") == 0.0
    for second in range(10):
        room.expired(float(second))
        for _ in range(10):
            take(room)
    room.expired(10.0)
    assert room.estimated_wait_seconds("m") == pytest.approx(10.0)
    for second in range(11, 200):
        room.expired(float(second))
    assert 1000 < room.estimated_wait_seconds("m") <= 3600


def test_one_who_is_put_back_was_not_taken() -> None:
    room = WaitingRoom(10)
    filled(room, ticket())
    room.expired(0.0)
    turn = room.next("m")
    assert turn is not None
    room.put_back(turn)
    room.expired(1.0)
    assert room.estimated_wait_seconds("m") == 3600


def test_nothing_is_kept_of_tenants_and_models_that_are_gone() -> None:
    room = WaitingRoom(10)
    for number in range(5 * MOST_REMEMBERED):
        room.served(f"tenant {number}", 1.0, 100, "m")
        filled(room, ticket(f"waiting {number}"))
        room.remove(ticket()) if number % 2 else take(room)
        room.expired(float(number))
        while room.next("m") is not None:
            pass
    assert room.remembered() <= MOST_REMEMBERED + 3
    for number in range(5 * MOST_IDLE_MODELS):
        filled(room, ticket(model=f"model {number}", deadline=0.0))
        room.expired(1.0)
    assert room.remembered() <= MOST_REMEMBERED + 3 * MOST_IDLE_MODELS


def test_nothing_is_kept_of_those_who_left_without_an_answer() -> None:
    room = WaitingRoom(10)
    for number in range(100):
        room.remove(*filled(room, ticket(f"tenant {number}")))
    assert room.remembered() == 1


def test_who_was_served_last_is_remembered_longest() -> None:
    room = WaitingRoom(10)
    for name in ("steady", *map(str, range(MOST_REMEMBERED - 1)), "steady", "one more", "another"):
        room.served(name, 1.0, 100, "m")
    steady, new = filled(room, ticket("steady"), ticket("new"))
    assert [take(room), take(room)] == [new, steady]


def test_a_model_is_forgotten_only_when_nobody_waits_for_it_and_others_were_used_later() -> None:
    room = WaitingRoom(10)
    (one,) = filled(room, ticket(model="waited for"))
    room.served("a", 1.0, 1_000_000, "used")
    for number in range(3 * MOST_IDLE_MODELS):
        room.served("b", 1.0, 100, f"model {number}")
        room.served("b", 1.0, 100, "used")
    assert take(room, "waited for") is one
    second, first = filled(room, ticket("a", model="used"), ticket("b", model="used"))
    assert [take(room, "used"), take(room, "used")] == [first, second]


# Everything at once


class Room(RuleBasedStateMachine):
    """A waiting room beside a list of tickets and a start tag for each tenant, looked through from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.room = WaitingRoom(6)
        self.waiting: list[Ticket] = []  # of one tenant, priority and model in their order
        self.start: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.virtual: defaultdict[str, float] = defaultdict(float)
        self.now = 0.0

    def floor(self, model: str, priority: int | None) -> float:
        of_model = [one for one in self.waiting if one.model == model]
        tags = [self.start[model, one.tenant] for one in of_model if priority is None or one.priority == priority]
        return min([self.virtual[model], *tags])

    def enter(self, one: Ticket, place: int) -> None:
        line = (one.model, one.tenant, one.priority)
        if not any((other.model, other.tenant, other.priority) == line for other in self.waiting):
            tag = self.floor(one.model, one.priority)
            self.start[one.model, one.tenant] = max(self.start[one.model, one.tenant], tag)
        self.waiting.insert(place, one)

    def count(self, model: str, tenant: str, weight: float, tokens: int) -> None:
        key = (model, tenant)
        if not any((one.model, one.tenant) == key for one in self.waiting):
            self.start[key] = max(self.start[key], self.floor(model, None))
        self.virtual[model] = max(self.virtual[model], self.start[key])
        self.start[key] += tokens / weight

    def victim_of(self, one: Ticket) -> tuple[float, int] | None:
        """Tickets over weight of who has most, and how many there are at most in its place."""
        held = Counter(other.tenant for other in self.waiting)
        weights = {other.tenant: weight_of(other.tenant) for other in [*self.waiting, one]}
        share = 6 * weights[one.tenant] / sum(weights.values())
        if held[one.tenant] >= share:
            return None
        lower = {other.tenant for other in self.waiting if other.priority <= one.priority}
        most = max((held[tenant] / weights[tenant] for tenant in lower), default=0.0)
        return (most, 0) if most > (held[one.tenant] + 1) / weights[one.tenant] else None

    @rule(
        tenant=st.sampled_from("abc"),
        model=st.sampled_from("mn"),
        priority=st.sampled_from([0, 0, 0, 1]),
        tokens=st.integers(1, 100),
        wait=st.integers(1, 20),
        most=st.sampled_from([2, PLENTY, PLENTY]),
    )
    def add(self, tenant: str, model: str, priority: int, tokens: int, wait: int, most: int) -> None:
        weight = weight_of(tenant)
        one = ticket(tenant, model=model, priority=priority, weight=weight, tokens=tokens, deadline=self.now + wait)
        held = Counter(other.tenant for other in self.waiting)
        victim = self.victim_of(one) if len(self.waiting) >= 6 else None
        answer = self.room.add(one, most)
        displaced = self.room.displaced()
        if held[tenant] >= most:
            assert answer == "tenant_full"
        elif len(self.waiting) >= 6 and victim is None:
            assert answer == "full"
        else:
            assert answer == ""
        assert len(displaced) == (answer == "" and len(self.waiting) >= 6)
        for gone in displaced:
            assert victim is not None
            assert held[gone.tenant] / gone.weight == victim[0]
            assert gone.priority <= priority
            assert gone.tenant != tenant
            self.waiting.remove(gone)
        if not answer:
            self.enter(one, len(self.waiting))

    @rule(model=st.sampled_from("mn"), back=st.booleans())
    def take(self, model: str, back: bool) -> None:
        one = self.room.next(model)
        candidates = [other for other in self.waiting if other.model == model]
        if one is None:
            assert not candidates
            return
        assert one in candidates
        highest = [other for other in candidates if other.priority == one.priority]
        assert one.priority == max(other.priority for other in candidates)
        assert one is next(other for other in highest if other.tenant == one.tenant)
        assert self.start[model, one.tenant] == min(self.start[model, other.tenant] for other in highest)
        place = self.waiting.index(one)
        self.waiting.remove(one)
        if back:
            self.room.put_back(one)
            self.enter(one, place)
            assert self.room.next(model) is one
            self.waiting.remove(one)
        self.count(model, one.tenant, one.weight, one.tokens)
        self.room.served(one.tenant, one.weight, one.tokens, model)

    @rule(tenant=st.sampled_from("abc"), model=st.sampled_from("mn"), tokens=st.integers(1, 100))
    def serve(self, tenant: str, model: str, tokens: int) -> None:
        self.room.served(tenant, weight_of(tenant), tokens, model)
        self.count(model, tenant, weight_of(tenant), tokens)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.waiting))
        assert self.room.remove(one)
        assert not self.room.remove(one)
        self.waiting.remove(one)

    @rule(seconds=st.integers(0, 5))
    def later(self, seconds: int) -> None:
        self.now += seconds
        late = self.room.expired(self.now)
        assert [one.deadline for one in late] == sorted(one.deadline for one in late)
        assert set(late) == {one for one in self.waiting if one.deadline <= self.now}
        self.waiting = [one for one in self.waiting if one not in late]

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.room) == len(self.waiting)
        assert sorted(self.room.models()) == sorted({one.model for one in self.waiting})
        for model in "mn":
            assert self.room.waiting_for(model) == sum(one.model == model for one in self.waiting)
            assert self.room.estimated_wait_seconds(model) >= 0
        for tenant in "abc":
            assert self.room.waiting_of(tenant) == sum(one.tenant == tenant for one in self.waiting)

    def teardown(self) -> None:
        taken = itertools.chain.from_iterable(iter(lambda: self.room.next(model), None) for model in "mn")  # noqa: B023
        assert {id(one) for one in taken} == {id(one) for one in self.waiting}
        assert not self.room


def weight_of(tenant: str) -> float:
    return {"a": 1.0, "b": 2.0, "c": 0.5}[tenant]


TestRoom = Room.TestCase
TestRoom.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
