"""Objects in an S3 bucket or a folder, one a value: what they are called, and the calls, each of which may block for
its time-out and ends in a reason. What is known of them is kept elsewhere.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

import xxhash

from kvhearth.errors import UserError
from kvhearth.store.tiers.files import HEAD_BYTES, FileError, Flaw
from kvhearth.store.tiers.guard import Reason, TierError, reason_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_PROBE_NAME = "probe"
_SUFFIX = ".kv"
_SEGMENT = 120  # a file:// store's names are file names
_NAME = re.compile(r"[0-9a-f]{2}/([A-Za-z0-9_/-]+)\.kv")
_PAGE = 1000
_CONNECT_SECONDS = 3.0


class Listed(NamedTuple):
    """An object as a listing tells of it.

    Attributes:
        key: the key.
        nbytes: length of the value.
        written: Unix seconds.
    """

    key: bytes
    nbytes: int
    written: int


class S3Access(NamedTuple):
    """How to reach an S3 bucket; what is None comes from the environment (``AWS_ENDPOINT_URL``, ``AWS_REGION``,
    ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``), or from the machine's role."""

    endpoint: str | None = None
    region: str | None = None
    access_key: str | None = None
    secret_key: str | None = None

    def __repr__(self) -> str:
        return f"S3Access(endpoint={self.endpoint!r}, region={self.region!r})"


class Bucket:
    """The objects under ``url``.

    Args:
        url: ``s3://bucket/prefix`` or ``file:///path``.
        access: for ``s3://``.
        timeout_seconds: of one request, and of all its retries together.
        retries: most of them, of one call.

    Raises:
        UserError: the URL is neither, holds credentials, or the package obstore is missing.
    """

    def __init__(self, url: str, access: S3Access, timeout_seconds: float, retries: int) -> None:
        try:
            import obstore
        except ImportError:
            raise UserError(
                "the package obstore is not installed", where="object", remedy="pip install 'kvhearth[store]'"
            ) from None
        self._api: Any = obstore
        self._folder: Path | None = None
        self._opened: ObjectStore | None = None
        parts = _checked(url)
        if parts.scheme == "file":
            self._folder = Path(unquote(parts.path))
        else:
            self._opened = _open_s3(parts, access, timeout_seconds, retries)

    @property
    def _store(self) -> ObjectStore:
        # A put would make the folder, and where its volume is not mounted that would fill the file system below.
        if self._folder is not None and not self._folder.is_dir():
            raise TierError(Reason.MISSING)
        if self._opened is None:
            from obstore.store import LocalStore

            self._opened = LocalStore(self._folder)
        return self._opened

    def put(self, key: bytes, body: bytes) -> None:
        """Keep ``body`` as the object of ``key``.

        Raises:
            TierError: it was not.
        """
        with _Translated(Reason.MISSING):
            self._api.put(self._store, name_of(key), body, use_multipart=False)

    def get(self, key: bytes, object_bytes: int) -> memoryview:
        """The object of ``key``.

        Raises:
            FileError: it has not ``object_bytes`` bytes; it was not transferred.
            TierError: ``vanished``, or it cannot be had.
        """
        with _Translated(Reason.VANISHED):
            result = self._api.get(self._store, name_of(key))
            if result.meta["size"] != object_bytes:
                raise FileError(Flaw.TRUNCATED)
            return memoryview(result.bytes())

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete the objects of ``keys``; those that are gone already are as good.

        Raises:
            TierError: some may still be there. ``denied`` does not speak against the bucket: others may be read.
        """
        names = [name_of(key) for key in keys]
        if not names:
            return
        try:
            with _Translated(Reason.VANISHED):
                self._api.delete(self._store, names)
        except TierError as error:
            if error.reason is Reason.DENIED:
                raise TierError(Reason.DENIED, sick=False) from None
            if error.reason is not Reason.VANISHED:
                raise
            for name in names if len(names) > 1 else ():  # a store that stops at the first that is gone
                self._delete_one(name)

    def _delete_one(self, name: str) -> None:
        try:
            with _Translated(Reason.VANISHED):
                self._api.delete(self._store, name)
        except TierError as error:
            if error.reason is not Reason.VANISHED:
                raise

    def pages(self) -> Iterator[list[Listed]]:
        """All objects of ours, a thousand at a time, in no order.

        Raises:
            TierError: the listing broke off.
        """
        with _Translated(Reason.MISSING):
            for page in self._api.list(self._store, chunk_size=_PAGE):
                yield list(_listed(page))

    def check_reading(self) -> None:
        """Whether it can be listed.

        Raises:
            TierError: it cannot.
        """
        with _Translated(Reason.MISSING):
            next(iter(self._api.list(self._store, chunk_size=1)), None)

    def check_writing(self) -> None:
        """Whether a small object can be kept.

        Raises:
            TierError: it cannot.
        """
        with _Translated(Reason.MISSING):
            self._api.put(self._store, _PROBE_NAME, b"kvhearth", use_multipart=False)


def name_of(key: bytes) -> str:
    """The object's name: a hash's two digits, to spread them, and the key in URL-safe base64, in path segments."""
    text = base64.urlsafe_b64encode(key).rstrip(b"=").decode()
    path = "/".join(text[at : at + _SEGMENT] for at in range(0, len(text), _SEGMENT))
    return f"{xxhash.xxh3_64_intdigest(key) & 0xFF:02x}/{path}{_SUFFIX}"


def key_of(name: str) -> bytes | None:
    """The key of an object's name; None: not ours."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    text = match[1].replace("/", "")
    try:
        key = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
    except binascii.Error:
        return None
    return key if name_of(key) == name else None


def _listed(page: Iterable[Any]) -> Iterator[Listed]:
    for item in page:
        key = key_of(item["path"])
        if key is not None and (nbytes := item["size"] - HEAD_BYTES - len(key)) >= 0:
            yield Listed(key, nbytes, int(item["last_modified"].timestamp()))


class _Translated:
    """Turns the client's errors into reasons. Their texts are dropped: they may quote signed requests.

    Args:
        not_found: what a 404 means here. ``vanished`` concerns one object, ``missing`` the bucket.
    """

    def __init__(self, not_found: Reason) -> None:
        self._not_found = not_found

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        if isinstance(error, FileNotFoundError):
            raise TierError(self._not_found, sick=self._not_found is Reason.MISSING) from None
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            raise TierError(Reason.DENIED) from None
        if isinstance(error, OSError):
            raise TierError(reason_of(error)) from None
        if isinstance(error, BaseError):
            raise TierError(_by_text(str(error))) from None


def _by_text(text: str) -> Reason:
    # A listing's errors come without a type.
    if "NoSuchBucket" in text:
        return Reason.MISSING
    if re.search(r"status: 40[13]\b", text):
        return Reason.DENIED
    return Reason.TIMEOUT if "timed out" in text else Reason.IO


def _checked(url: str) -> SplitResult:
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query:
        raise UserError(
            "credentials do not belong into the URL", where="object", remedy="set AWS_ACCESS_KEY_ID and the like"
        )
    is_folder = parts.scheme == "file" and not parts.netloc and parts.path.startswith("/")
    if not is_folder and not (parts.scheme == "s3" and parts.netloc):
        raise UserError(
            f"{url!r} is no place for objects", where="object", remedy="give s3://bucket/prefix or file:///path"
        )
    return parts


def _open_s3(parts: SplitResult, access: S3Access, timeout_seconds: float, retries: int) -> ObjectStore:
    from obstore.store import S3Store

    endpoint = access.endpoint or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
    settings: dict[str, Any] = {
        "endpoint": endpoint,
        "region": access.region,
        "access_key_id": access.access_key,
        "secret_access_key": access.secret_key,
        # Each object has a checksum of ours inside; hashing it again for the signature would cost more than sending it.
        "unsigned_payload": True,
    }
    timeout = timedelta(seconds=timeout_seconds)
    return S3Store(
        parts.netloc,
        prefix=parts.path.strip("/") or None,
        config={name: value for name, value in settings.items() if value is not None},  # type: ignore[arg-type]
        client_options={
            "allow_http": (endpoint or "").startswith("http://"),
            "connect_timeout": min(timeout, timedelta(seconds=_CONNECT_SECONDS)),
            "timeout": timeout,
        },
        retry_config={
            "max_retries": retries,
            "retry_timeout": timeout,
            "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=1), "base": 2},
        },
    )
