"""Keys are made so that nobody can guess them, shown once, and found again by their digest."""

from __future__ import annotations

import io
import sys

import pytest

from kvhearth.cli.main import run


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run(["router", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_key_that_was_made_opens_the_file_that_has_its_line(capsys, tmp_path, monkeypatch):
    code, made, line = said(capsys, "key")
    assert code == 0
    assert made.startswith("kvh-")
    assert len(made.strip()) == 47
    file = tmp_path / "tenants.yaml"
    entry = line.strip().removeprefix("for the tenants file:").strip()
    file.write_text(f"tenants: {{acme: {{{entry}, group: friends, requests_per_minute: 5000}}, second: {{}}}}")
    file.chmod(0o600)
    monkeypatch.setattr(sys, "stdin", io.StringIO(made))
    assert said(capsys, "key", "--check", str(file))[:2] == (0, "acme\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("kvh-wrong\n"))
    code, _, error = said(capsys, "key", "--check", str(file))
    assert code == 2
    assert "nobody's key" in error
    code, table, _ = said(capsys, "tenants", str(file))
    assert code == 0
    assert "acme" in table
    assert "5,000" in table
    assert "group" in table


def test_no_two_keys_are_alike(capsys):
    assert len({said(capsys, "key")[1] for _ in range(20)}) == 20


def test_a_wrong_file_is_named(capsys, tmp_path):
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: {a: {keys: [kvh-plain]}}")
    file.chmod(0o600)
    code, _, error = said(capsys, "tenants", str(file))
    assert code == 2
    assert "sha256:" in error
    assert "kvh-plain" not in error
