"""vLLM's version: what is supported is named, and everything else is refused with the range."""

from __future__ import annotations

import pytest

from kvhearth.errors import UserError
from kvhearth.stack.versions import minor_version, supported_range


@pytest.mark.parametrize(
    ("installed", "minor"), [("0.31.0", "0.31"), ("0.32.0+cpu", "0.32"), ("0.32.1rc1", "0.32"), ("0.33.2", "0.33")]
)
def test_an_installed_version_is_found_by_its_minor(installed: str, minor: str) -> None:
    assert minor_version(installed) == minor


@pytest.mark.parametrize("installed", ["0.30.9", "0.34.0", "1.0", "0.3.1"])
def test_a_version_outside_the_range_is_refused_with_what_to_do(installed: str) -> None:
    line = rf"^here: vLLM {installed} is not supported, only {supported_range()}; pip install 'vllm==0\.32\.\*'"
    with pytest.raises(UserError, match=line):
        minor_version(installed, where="here")


def test_what_is_no_version_is_refused() -> None:
    with pytest.raises(UserError, match=f"'nightly' is no version; install {supported_range()}"):
        minor_version("nightly")
