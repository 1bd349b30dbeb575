"""The catalog: GPUs, links and models by name, each figure with its source and grade. Reads only the package's files.

Grades: P published by its authors, M measured by this project, D derived, ? unverified.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from kvhearth.cost.hardware import Gpu, Link
from kvhearth.cost.model import Model
from kvhearth.errors import UserError

KINDS = ("gpus", "links", "models")
GRADES = {"P": "published", "M": "measured", "D": "derived", "?": "unverified"}


class Figure(NamedTuple):
    """One figure of the catalog and where it comes from; ``value`` is a shape's fields for a model."""

    kind: str
    name: str
    field: str
    value: Any
    source: str
    grade: str


def find_gpu(name: str) -> Gpu:
    """A GPU by name or alias, case-insensitive.

    Raises:
        UserError: unknown name, with near ones.
    """
    key, entry = _find("gpus", name, "gpu")
    return Gpu(name=key, **_values(entry))


def find_link(name: str) -> Link:
    """A link by name or alias, case-insensitive.

    Raises:
        UserError: unknown name, with near ones.
    """
    key, entry = _find("links", name, "link")
    return Link(name=key, **_values(entry))


def find_model(name: str) -> Model:
    """A model by name, alias or Hugging Face id, case-insensitive.

    Raises:
        UserError: unknown name, with near ones.
    """
    key, entry = _find("models", name, "model")
    return Model(name=key, **entry["shape"]["value"])


def names(kind: str) -> list[str]:
    """Names of one of `KINDS` in the catalog's order, without aliases."""
    return list(_entries(kind))


def figures() -> Iterator[Figure]:
    """Every figure of the catalog."""
    for kind in KINDS:
        for name, entry in _entries(kind).items():
            for field, figure in entry.items():
                if field != "aliases":
                    yield Figure(kind, name, field, figure["value"], figure["source"], figure["grade"])


def _values(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {field: figure["value"] for field, figure in entry.items() if field != "aliases"}


@cache
def _entries(kind: str) -> Mapping[str, Mapping[str, Any]]:
    text = resources.files("kvhearth.cost").joinpath("data", f"{kind}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def _index(kind: str) -> Mapping[str, str]:
    index: dict[str, str] = {}
    for name, entry in _entries(kind).items():
        for alias in (name, *entry.get("aliases", ())):
            index[alias.lower()] = name
    return index


def _find(kind: str, name: str, where: str) -> tuple[str, Mapping[str, Any]]:
    index = _index(kind)
    key = index.get(name.lower())
    if key is None:
        near = dict.fromkeys(index[hit] for hit in difflib.get_close_matches(name.lower(), index, n=6, cutoff=0.4))
        choices = list(near)[:3] or names(kind)
        remedy = f"did you mean {' or '.join(choices)}?" if near else f"choose one of {', '.join(choices)}"
        if kind == "models":
            remedy += " (or give its Hugging Face config.json)"
        raise UserError(f"unknown {where} {name!r}", where=where, remedy=remedy)
    return key, _entries(kind)[key]
