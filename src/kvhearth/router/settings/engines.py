"""The engines that the router is told of, and what is said of each: as flags, as variables, or as a list in YAML."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvhearth.errors import UserError
from kvhearth.router.config import EventSource
from kvhearth.router.settings.table import PER_ENGINE
from kvhearth.settings import Given, read_pairs, read_texts, shown

_KEYS = {key: name for name, (key, _) in PER_ENGINE.items()}
_MOST_RANKS_DIGITS = 9


class Told(NamedTuple):
    """What is said of engines, each value with its place."""

    urls: dict[str, Given] | None = None
    """By engine's name; None: nobody names engines."""
    said: Mapping[str, Mapping[str, Given]] = {}
    """By setting (one of `PER_ENGINE`), then by engine's name."""


def read_engines(layers: Iterable[Mapping[str, Given]]) -> Told:
    """What all layers say; one that names engines takes the place of all that those before it said of engines.

    Raises:
        UserError: something that cannot be read, or an engine twice.
    """
    urls: dict[str, Given] | None = None
    said: dict[str, dict[str, Given]] = {name: {} for name in PER_ENGINE}
    for layer in layers:
        if "engines" in layer:
            told = _named(layer["engines"])
            urls, said = told.urls, {name: dict(told.said.get(name, {})) for name in PER_ENGINE}
        for name in PER_ENGINE:
            if name in layer:
                said[name] |= _by_engine(name, layer[name])
    return Told(urls, said)


def data_parallel_of(told: Told) -> dict[str, int]:
    """Ranks by engine.

    Raises:
        UserError: one is no whole number.
    """
    ranks: dict[str, int] = {}
    for name, given in told.said["data_parallel"].items():
        text = str(given.value)
        if isinstance(given.value, bool) or not text.isdecimal() or len(text) > _MOST_RANKS_DIGITS:
            raise UserError(f"{shown(given.value)} is not a whole number", where=given.where, remedy="give one, as 8")
        ranks[name] = int(text)
    return ranks


def event_sources_of(told: Told) -> dict[str, EventSource]:
    """Where engines tell what they hold.

    Raises:
        UserError: an address cannot be one, or belongs to an engine that publishes no events.
    """
    events, replays, snapshots = (told.said[f"kv.{name}"] for name in ("events", "replay", "snapshot"))
    for others in (replays, snapshots):
        for name in others.keys() - events.keys():
            remedy = "say where: --kv-events, or kv_events in the file"
            raise UserError(f"{name!r} publishes no events", where=others[name].where, remedy=remedy)
    sources: dict[str, EventSource] = {}
    for name, given in events.items():
        source = EventSource(given.value)
        source.check(given.where)
        if name in replays:
            source = EventSource(source.events, replays[name].value)
            source.check(replays[name].where)
        if name in snapshots:
            source = EventSource(source.events, source.replay, snapshots[name].value)
            source.check(snapshots[name].where)
        sources[name] = source
    return sources


def name_and_url(text: str) -> tuple[str, str]:
    """``name=url`` or ``url``, whose name is then its host and port."""
    name, equals, url = text.partition("=")
    if equals and "://" not in name:
        return name, url
    return text.partition("://")[2].rstrip("/") or text, text


def _named(given: Given) -> Told:
    if given.folder is None:  # a flag or a variable
        pairs = [name_and_url(text) for text in read_texts(given)]
        return Told(_once([(name, Given(url, f"{given.where} {name}")) for name, url in pairs]))
    if given.value is not None and not isinstance(given.value, list):
        remedy = "write a list of URLs, or of {name: a, url: http://host:8000}"
        raise UserError(f"{shown(given.value)} is not a list", where=given.where, remedy=remedy)
    named: list[tuple[str, Given]] = []
    said: dict[str, dict[str, Given]] = {}
    for number, engine in enumerate(given.value or []):
        where = f"{given.where}[{number}]"
        if isinstance(engine, str):
            name, url = name_and_url(engine)
            named.append((name, Given(url, where)))
            continue
        keys = _checked(engine, where)
        name = str(keys.pop("name", None) or name_and_url(keys["url"])[0])
        named.append((name, Given(keys.pop("url"), f"{where}.url")))
        for key, value in keys.items():
            said.setdefault(_KEYS[key], {})[name] = Given(value, f"{where}.{key}")
    return Told(_once(named), said)


def _checked(engine: Any, where: str) -> dict[str, Any]:
    """An engine of the YAML file, with known keys only; those without a value count as not given."""
    if not isinstance(engine, dict):
        remedy = "write a URL, or {name: a, url: http://host:8000}"
        raise UserError(f"{shown(engine)} is no engine", where=where, remedy=remedy)
    known = ("name", "url", *_KEYS)
    for key, value in engine.items():
        if key not in known:
            near = difflib.get_close_matches(str(key).replace("-", "_"), known, 1)
            remedy = f"did you mean {near[0]}?" if near else f"use {', '.join(known)}"
            raise UserError(f"{shown(key)} is not said of an engine", where=where, remedy=remedy)
        if key != "data_parallel" and value is not None and not isinstance(value, str):
            raise UserError(f"{shown(value)} is not text", where=f"{where}.{key}", remedy="put it in quotes")
    if not engine.get("url"):
        raise UserError("an engine without a URL", where=where, remedy="give url: http://host:8000")
    return {key: value for key, value in engine.items() if value is not None}


def _by_engine(name: str, given: Given) -> dict[str, Given]:
    key, example = PER_ENGINE[name]
    form = f"name={'ranks' if key == 'data_parallel' else example}"
    return {engine: Given(value, f"{given.where} {engine}") for engine, value in read_pairs(given, form).items()}


def _once(named: Iterable[tuple[str, Given]]) -> dict[str, Given]:
    urls: dict[str, Given] = {}
    for name, given in named:
        if name in urls:
            raise UserError(f"{name!r} is there twice", where=given.where, remedy="give each engine its own name")
        urls[name] = given
    return urls
