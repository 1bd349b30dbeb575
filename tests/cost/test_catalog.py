"""Names find their figures, every figure says where it comes from, and shapes add up to published parameter counts."""

from __future__ import annotations

import pytest

from kvhearth.cost import catalog, find_gpu, find_link, find_model
from kvhearth.errors import UserError


@pytest.mark.parametrize(
    "name", ["Llama-3.1-8B", "llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "META-LLAMA/LLAMA-3.1-8B-INSTRUCT"]
)
def test_a_model_is_found_by_name_alias_and_any_case(name: str) -> None:
    assert find_model(name).name == "Llama-3.1-8B"


@pytest.mark.parametrize(("name", "gpu"), [("h100", "H100"), ("4090", "RTX-4090"), ("gh200", "GH200-96")])
def test_a_gpu_is_found_by_alias(name: str, gpu: str) -> None:
    assert find_gpu(name).name == gpu


def test_a_link_is_found_by_alias() -> None:
    assert find_link("S3").name == "ceph-rgw-read"
    assert find_link("100GbE").bandwidth == 12.5e9


def test_an_unknown_name_lists_near_ones() -> None:
    with pytest.raises(UserError, match=r"model: unknown model 'lama-3\.1-8b'.*Llama-3\.1-8B"):
        find_model("lama-3.1-8b")
    with pytest.raises(UserError, match=r"unknown gpu 'H1000'.*H100"):
        find_gpu("H1000")
    with pytest.raises(UserError, match=r"choose one of .*nvme-read"):
        find_link("xyzzyxyzzy")


def test_every_figure_has_a_source_and_a_grade() -> None:
    figures = list(catalog.figures())
    assert len(figures) > 100
    for figure in figures:
        assert figure.grade in catalog.GRADES, figure
        assert figure.source, figure


@pytest.mark.parametrize("kind", catalog.KINDS)
def test_every_entry_can_be_used_and_no_alias_means_two_things(kind: str) -> None:
    find = {"gpus": find_gpu, "links": find_link, "models": find_model}[kind]
    owners: dict[str, str] = {}
    for name, entry in catalog._entries(kind).items():
        for alias in (name, *entry.get("aliases", ())):
            assert find(alias).name == name
            assert owners.setdefault(alias.lower(), name) == name


PUBLISHED_PARAMS_TOLERANCE = {"Kimi-K2": 0.03}  # published as "1 T"
ACTIVE_PARAMS_TOLERANCE = {"Qwen3-30B-A3B": 0.09}  # its card also counts the embedding lookup


@pytest.mark.parametrize("name", catalog.names("models"))
def test_shapes_add_up_to_the_published_parameters(name: str) -> None:
    entry, model = catalog._entries("models")[name], find_model(name)
    tolerance = PUBLISHED_PARAMS_TOLERANCE.get(name, 0.0005)
    assert model.params == pytest.approx(entry["params"]["value"], rel=tolerance)
    if "active_params" in entry:
        tolerance = ACTIVE_PARAMS_TOLERANCE.get(name, 0.015)
        assert model.active_params == pytest.approx(entry["active_params"]["value"], rel=tolerance)


@pytest.mark.parametrize("name", catalog.names("gpus"))
def test_a_gpu_offers_no_more_memory_than_its_chips_hold(name: str) -> None:
    gpu = find_gpu(name)
    assert 0.95 * gpu.hbm_bytes < gpu.device_bytes < 1.08 * gpu.hbm_bytes
