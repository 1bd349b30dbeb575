"""``python -m kvhearth.cost``: prints the catalog with its sources, or predictions beside published figures."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvhearth.cost import catalog
from kvhearth.cost.catalog import find_model
from kvhearth.cost.costmodel import CostModel
from kvhearth.cost.published import rows


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(prog="python -m kvhearth.cost", description=__doc__)
    tables = {"gpus": _gpus, "links": _links, "models": _models, "published": _published}
    parser.add_argument("table", choices=tables)
    for line in tables[parser.parse_args().table]():
        print(line)


def _table(header: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + " --- |" * len(header)
    for cells in body:
        yield "| " + " | ".join(cells) + " |"


def _figures(kind: str) -> Iterator[str]:
    cells = (
        (figure.name, figure.field, _number(figure.value), figure.grade, figure.source)
        for figure in catalog.figures()
        if figure.kind == kind
    )
    return _table(("name", "figure", "value", "grade", "source"), cells)


def _gpus() -> Iterator[str]:
    return _figures("gpus")


def _links() -> Iterator[str]:
    return _figures("links")


def _models() -> Iterator[str]:
    def body() -> Iterator[Sequence[str]]:
        for figure in catalog.figures():
            if figure.kind != "models" or figure.field != "shape":
                continue
            model = find_model(figure.name)
            cost = CostModel(model, "H100")
            windows = cost.kv_bytes(1 << 20) - cost.kv_bytes_per_token * (1 << 20)
            heads = f"{model.layers} / {model.kv_heads} / {model.head_dim}"
            if model.is_mla:
                heads = f"{model.layers}, MLA {model.kv_lora_rank}+{model.rope_dim}"
            kv = f"{cost.kv_bytes_per_token:,}" + (f" + {windows:,}" if windows else "")
            counts = (f"{model.params / 1e9:.2f}", f"{model.active_params / 1e9:.2f}")
            yield (model.name, heads, kv, *counts, model.weight_dtype, figure.source)

    header = (
        "model",
        "layers / kv heads / head dim",
        "KV bytes a token (+ windows)",
        "params B",
        "active B",
        "weights",
    )
    return _table((*header, "source of the shape"), body())


def _published() -> Iterator[str]:
    group = ""
    for row in rows():
        if row.group != group:
            group = row.group
            yield f"\n**{group}**\n"
            yield from _table(("", "published", "model", "difference", "allowed", "why"), ())
        predicted = row.predict()
        use = "fitted; " if row.fitted else ""
        yield (
            f"| {row.what} | {row.published:g} {row.unit} | {predicted:.4g} | {predicted / row.published - 1:+.1%} "
            f"| {row.tolerance:.1%} | {use}{row.why} |"
        )


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


if __name__ == "__main__":
    main()
