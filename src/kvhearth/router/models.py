"""What the router says of models: the cards of all engines, each once, and one for every alias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhearth.router.engines import Engine


def model_cards(engines: Sequence[Engine], aliases: Mapping[str, str]) -> list[dict[str, Any]]:
    """Cards as ``/v1/models`` lists them, by name.

    Models and LoRA adapters of any engine (where several have one, the first engine's card), and each alias as its
    model's card with ``root`` naming that model. An alias of a model that no engine has is left out.
    """
    merged = {card["id"]: card for engine in reversed(engines) for card in engine.cards}
    named = {
        alias: {**merged[model], "id": alias, "root": model} for alias, model in aliases.items() if model in merged
    }
    cards = {**merged, **named}
    return [cards[name] for name in sorted(cards)]
