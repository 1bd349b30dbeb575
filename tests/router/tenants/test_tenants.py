"""Tenants: who a key belongs to, what they may use, and that they learn nothing of one another."""

from __future__ import annotations

import hashlib
import logging
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.errors import UserError
from kvhearth.metrics import router_tenants as names
from kvhearth.router.tenants import Tenants
from kvhearth.router.tenants.bucket import Bucket
from kvhearth.router.tenants.spec import read_tenants
from kvhearth.router.tenants.tenants import MOST_LABELS

SECRET = b"a secret of the operator"
KEY = b"kvh-key-of-acme"


def digest(key: bytes) -> str:
    return "sha256:" + hashlib.sha256(key).hexdigest()


@pytest.fixture
def write(tmp_path):
    path = tmp_path / "tenants.yaml"

    def write(text: str):
        other = path.with_suffix(".new")
        other.write_text(text)
        other.chmod(0o600)
        os.replace(other, path)
        return path

    return write


@pytest.fixture
def tenants(write):
    def make(text: str, secret: bytes = SECRET) -> Tenants:
        return Tenants(write(text), secret, lambda: 0.0)

    return make


def acme(more: str = "") -> str:
    return f'tenants: {{acme: {{keys: ["{digest(KEY)}"]{more}}}}}'


# Keys


def test_a_tenant_is_found_by_its_key_in_either_header(tenants):
    found = tenants(acme())
    for given_key in (found.authenticate(b"Bearer " + KEY), found.authenticate(b"bearer " + KEY), found.by_key(KEY)):
        assert given_key is not None
        assert given_key.name == "acme"
    for wrong in (b"", b"Bearer", b"Bearer ", b"Bearer x", b"Basic " + KEY, KEY):
        assert found.authenticate(wrong) is None


async def test_a_key_that_is_taken_out_of_the_file_stops_at_once_and_what_runs_is_still_counted(tenants, write):
    found = tenants(acme())
    tenant = found.by_key(KEY)
    assert tenant.admit(0.0, 10) is None
    write(f'tenants: {{acme: {{keys: ["{digest(b"new")}"], priority: 5}}}}')
    await found.refresh()
    assert found.by_key(KEY) is None
    again = found.by_key(b"new")
    assert again is tenant
    assert (again.in_flight, again.priority) == (1, 5)


async def test_a_broken_file_changes_nothing_and_is_said_once(tenants, write, caplog):
    found = tenants(acme())
    write("tenants: [")
    for _ in range(3):
        await found.refresh()
    assert found.by_key(KEY) is not None
    assert found.failures == 1
    assert sum("stay as they were" in record.message for record in caplog.records) == 1
    write(acme())
    await found.refresh()
    assert found.last_error == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tenants: 3", "this is no tenants file"),
        ("tenant: {}", "this is no tenants file"),
        ("tenants: {a b: {}}", "not a tenant's name"),
        ("tenants: {a: 3}", "not a mapping"),
        ("tenants: {a: {prioritie: 3}}", "a name that is not known; did you mean priority?"),
        ("tenants: {other: {}}", "not a tenant's name"),
        ("tenants: {a: {kvh-plain: 3}}", "a name that is not known"),
        ("tenants: {a: {priority: kvh-plain}}", "priority: not a number"),
        ("tenants: {a: {group: 'kvh-plain x'}}", "cannot name a group"),
        ('tenants: {a: {keys: ["kvh-plain"]}}', "an entry is not sha256: and 64 hex digits"),
        ("tenants: {a: {priority: 101}}", "priority: not a number that will do; use -100 up to 100"),
        ("tenants: {a: {weight: 0}}", "weight: not a number that will do"),
        ("tenants: {a: {max_concurrency: 0}}", "max_concurrency: not a number that will do"),
        ("tenants: {a: {isolation: maybe}}", "isolation is something else"),
        ("tenants: {a: {isolation: isolated, group: g}}", "write isolation: shared"),
        ("tenants: {a: {group: 'x y'}}", "cannot name a group"),
        ("tenants: {a: {models: m}}", "models: not a list of patterns"),
        (f'tenants: {{a: {{keys: ["{digest(KEY)}"]}}, b: {{keys: ["{digest(KEY)}"]}}}}', "have the same key"),
    ],
)
def test_what_the_file_says_wrong_is_named_and_no_key_is_shown(write, text, said):
    with pytest.raises(UserError) as caught:
        read_tenants(write(text))
    assert said in str(caught.value)
    assert "kvh-plain" not in str(caught.value)


def test_a_file_that_everybody_may_read_is_refused(write):
    path = write(acme())
    path.chmod(0o644)
    with pytest.raises(UserError, match="everybody on this machine may read it; chmod o="):
        read_tenants(path)


# Groups


def test_the_common_group_has_no_salt_and_others_have_one_that_is_theirs_for_good(tenants):
    text = "tenants: {a: {}, b: {isolation: isolated}, c: {isolation: isolated}, d: {group: g}, e: {group: g}}"
    salts = {tenant.name: tenant.salt for tenant in tenants(text)}
    assert salts["a"] == ""
    assert salts["d"] == salts["e"] != ""
    assert len({salts["b"], salts["c"], salts["d"]}) == 3
    assert {tenant.name: tenant.salt for tenant in tenants(text)} == salts, "after a restart, in another replica"
    other = {tenant.name: tenant.salt for tenant in tenants(text, b"another secret")}
    assert all(other[name] != salts[name] for name in "bcde")


def test_a_group_cannot_be_named_so_that_it_gets_a_tenants_salt(tenants):
    found = {tenant.name: tenant.salt for tenant in tenants("tenants: {b: {isolation: isolated}, d: {group: b}}")}
    assert found["b"] != found["d"]


def test_without_a_secret_nobody_can_be_kept_apart(tenants):
    with pytest.raises(UserError, match="no secret to make its salt from; set KVHEARTH_ROUTER_SALT_SECRET"):
        tenants("tenants: {b: {isolation: isolated}}", b"")
    tenants("tenants: {b: {}}", b"")


# Limits


def test_more_at_once_than_allowed_is_429_and_an_end_makes_room(tenants):
    [tenant] = tenants(acme(", max_concurrency: 2"))
    assert [tenant.admit(0.0, 1) for _ in range(2)] == [None, None]
    refusal = tenant.admit(0.0, 1)
    assert (refusal.status, refusal.code) == (429, "tenant_concurrency")
    assert b"retry-after: 1\r\n" in refusal.extra
    tenant.ended(0.0, 0)
    assert tenant.admit(0.0, 1) is None


def test_more_requests_a_minute_than_allowed_is_429_with_the_time_until_the_next(tenants):
    [tenant] = tenants(acme(", requests_per_minute: 2"))
    assert [tenant.admit(0.0, 1) for _ in range(2)] == [None, None]
    refusal = tenant.admit(1.0, 1)
    assert (refusal.status, refusal.code) == (429, "rate_limit_exceeded")
    assert b"retry-after: 29\r\n" in refusal.extra
    assert b"x-ratelimit-limit-requests: 2\r\nx-ratelimit-remaining-requests: 0\r\n" in refusal.extra
    assert tenant.admit(30.0, 1) is None


def test_tokens_of_answers_count_too(tenants):
    [tenant] = tenants(acme(", tokens_per_minute: 100"))
    assert tenant.admit(0.0, 60) is None
    tenant.ended(0.0, 90)
    refusal = tenant.admit(0.0, 50)
    assert refusal.status == 429
    assert b"retry-after: 60\r\n" in refusal.extra
    assert tenant.admit(60.0, 50) is None


def test_a_request_that_found_no_place_costs_nothing(tenants):
    [tenant] = tenants(acme(", tokens_per_minute: 100, max_concurrency: 1"))
    for _ in range(5):
        assert tenant.admit(0.0, 90) is None
        tenant.turned_away(0.0, 90)
    assert tenant.admit(0.0, 100) is None


def test_a_prompt_that_can_never_fit_is_told_so(tenants):
    [tenant] = tenants(acme(", tokens_per_minute: 100"))
    refusal = tenant.admit(0.0, 101)
    assert (refusal.status, refusal.code) == (400, "too_many_tokens")
    assert tenant.in_flight == 0


def test_only_the_models_allowed_may_be_used(tenants):
    [tenant] = tenants(acme(', models: ["llama*", exact]'))
    assert [tenant.may_use(model) for model in ("llama-3", "exact", "qwen")] == [True, True, False]


@given(
    st.lists(st.tuples(st.floats(0, 90), st.integers(1, 40)), max_size=60),
    st.integers(1, 100),
)
def test_a_bucket_gives_no_more_than_a_minutes_worth_and_its_rate(asked, per_minute):
    bucket, now, taken = Bucket(per_minute, 0.0), 0.0, []
    for wait, amount in asked:
        now += wait
        seconds = bucket.wait_seconds(amount, now)
        if seconds == 0:
            bucket.take(amount, now)
            taken.append((now, amount))
        elif seconds < float("inf"):
            assert bucket.wait_seconds(amount, now) == seconds, "a refusal takes nothing"
        for start, _ in taken:
            within = sum(amount for at, amount in taken if at >= start)
            assert within <= per_minute + (now - start) * per_minute / 60 + 1e-6


# What is shown


async def test_neither_keys_nor_digests_nor_salts_nor_the_secret_are_shown_anywhere(tenants, caplog):
    caplog.set_level(logging.DEBUG)
    found = tenants(acme(", isolation: isolated"))
    [tenant] = found
    tenant.admit(0.0, 1)
    await found.refresh()
    shown = repr(found) + repr(tenant) + repr(tenant.spec) + str(list(found.metrics())) + caplog.text
    for hidden in (KEY.decode(), digest(KEY)[7:], tenant.salt, SECRET.decode()):
        assert hidden not in shown


def test_so_many_tenants_have_a_label_and_the_rest_one_together(tenants):
    found = tenants("tenants: {" + ", ".join(f"t{number}: {{}}" for number in range(MOST_LABELS + 5)) + "}")
    for tenant in found:
        tenant.admit(0.0, 1)
    [family] = [family for family in found.metrics() if family.metric is names.IN_FLIGHT]
    values = dict(family.samples)
    assert len(values) == MOST_LABELS + 1
    assert values["other",] == 5
