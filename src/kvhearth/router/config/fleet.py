"""What the router is told of its fleet: where engines are found, how prefill and decode share work, TLS."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from kvhearth.errors import UserError
from kvhearth.router.config.parsing import Transfer, check_positive, says

_NAME_PORT = re.compile(r"[^\s:/]+:\d{1,5}")


@dataclass(frozen=True, slots=True)
class Discovery:
    """Where engines are found, besides those that are named. Several ways may be used at once."""

    file: Path | None = field(
        default=None,
        metadata=says("YAML file that lists engines, read again when it changes.", flag="--engines-file"),
    )
    dns: str = field(
        default="",
        metadata=says("name:port whose addresses are engines (a headless service).", flag="--engines-dns"),
    )
    dns_interval_seconds: float = field(default=5.0, metadata=says("Between two resolutions of that name."))
    kv_events_port: int = field(
        default=0, metadata=says("Port of the KV events of engines found by DNS; 0: they have none.")
    )

    def __post_init__(self) -> None:
        check_positive(self, "discovery", may_be_zero=("kv_events_port",))
        if self.dns and not _NAME_PORT.fullmatch(self.dns):
            raise UserError(f"{self.dns!r} is not name:port", where="discovery.dns", remedy="use vllm-headless:8000")

    @property
    def is_used(self) -> bool:
        """Whether engines may come that nobody named."""
        return bool(self.file or self.dns)


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """How engines with role prefill and engines with role decode share the work on a request."""

    transfer: Transfer = field(
        default="store",
        metadata=says("How KV gets from prefill to decode: through the store, or nixl.", flag="--pd-transfer"),
    )
    local_prefill_tokens: int = field(
        default=512,
        metadata=says("A prompt with no more than that many tokens to compute is prefilled where it is decoded."),
    )
    await_seconds: float = field(
        default=5.0,
        metadata=says(
            "Longest wait of a decode engine for the chunks that prefill promised.", flag="--pd-await-seconds"
        ),
    )

    def __post_init__(self) -> None:
        check_positive(self, "disaggregation", may_be_zero=("local_prefill_tokens",))
        if self.transfer not in get_args(Transfer):
            remedy = f"use one of {', '.join(get_args(Transfer))}"
            raise UserError(f"{self.transfer!r} is unknown", where="disaggregation.transfer", remedy=remedy)


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates, as PEM files. The listener's is read again when it changes."""

    cert_file: Path | None = field(
        default=None,
        metadata=says("Certificate chain to serve HTTPS with; needs the key.", flag="--tls-cert", restart=True),
    )
    key_file: Path | None = field(
        default=None, metadata=says("The certificate's private key.", flag="--tls-key", restart=True)
    )
    engine_ca_file: Path | None = field(
        default=None,
        metadata=says("Certificates that https engines are verified with; the system's if not given.", restart=True),
    )

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            lacks = "key_file" if self.key_file is None else "cert_file"
            raise UserError("a certificate needs its key", where=f"tls.{lacks}", remedy="name both, or neither")
