"""Google Cloud Storage: the only door to Google's clients.

What objects are made of is decided elsewhere. Here is how one request is made, what its answer
means, and when it is made again. Credentials are Google's own default ones; they are renewed
before they expire, and once more when the server refuses them all the same.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from urllib.parse import quote

import google.auth
import requests
import tenacity
import urllib3.exceptions
from google.api_core.exceptions import GoogleAPICallError, PreconditionFailed
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import GoogleAuthError, TransportError
from google.auth.transport.requests import AuthorizedSession
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
from requests.adapters import HTTPAdapter

from everstep.runtime.backoff import random_exponential
from everstep.runtime.errors import (
    EverstepError,
    InvariantViolated,
    StorageRefused,
    StorageUnavailable,
)
from everstep.runtime.storage.answers import (
    PATIENCE,
    RETRY_AFTER_MAX_S,
    Patience,
    Trouble,
    judge_status,
    retry_after,
)
from everstep.runtime.storage.chunks import Bytes
from everstep.runtime.storage.objects import Body, Listing, Stat, crc_of
from everstep.runtime.storage.store import StorageMissing

THREADS = 8
"""Requests at a time: one does not fill a fast network."""
TIMEOUT_S = (10.0, 60.0)
"""To connect, and between two bytes."""
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_EMULATOR = "STORAGE_EMULATOR_HOST"
_TYPE = "application/octet-stream"
_READ_BYTES = 1 << 20
_NO_CREDENTIALS = (
    "credentials: a service account of this machine or pod, GOOGLE_APPLICATION_CREDENTIALS, or "
    "`gcloud auth application-default login`"
)

T = TypeVar("T")


class _Passing(StorageUnavailable):
    """It may pass by itself."""

    def __init__(
        self, name: str, found: str, trouble: Trouble, *, retry_after_s: float | None = None
    ) -> None:
        self.trouble = trouble
        super().__init__(f"{name}: {found}", retry_after_s=retry_after_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """Some of what was asked for, and how to ask for more."""

    objects: dict[str, Stat]
    folders: tuple[str, ...]
    following: str | None


class GcsBucket:
    """See `Objects`."""

    def __init__(
        self,
        name: str,
        *,
        patience: Mapping[Trouble, Patience] = PATIENCE,
        timeout_s: tuple[float, float] = TIMEOUT_S,
        page_size: int = 1000,
    ) -> None:
        """Prepare; nothing is asked yet.

        Raises:
            StorageRefused: there are no credentials.
        """
        self._name = name
        self._patience = patience
        self._timeout_s = timeout_s
        self._page_size = page_size
        credentials = _credentials(self.uri)
        self._session = AuthorizedSession(credentials)
        self._session.mount("http://", HTTPAdapter(pool_maxsize=2 * THREADS))
        self._session.mount("https://", HTTPAdapter(pool_maxsize=2 * THREADS))
        self._client: Any = storage.Client(project=None, credentials=credentials)
        self._bucket: Any = self._client.bucket(name)
        self._api = str(self._client.api_endpoint).rstrip("/")
        self._accepted: dict[str, Stat] = {}
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        return f"gs://{self._name}"

    def create(self, name: str, body: Body | bytes) -> bool:
        def attempt() -> Stat | None:
            if isinstance(body, bytes):
                return self._upload(name, body, if_generation_match=0)
            return self._send(name, body)

        with self._in_a_bucket():
            stat = self._tried(name, attempt)
            if stat is None:
                # Somebody's, or an earlier attempt's whose answer was lost.
                stat = Stat(len(body), crc_of(body))
                if self.stat(name) != stat:
                    return False
        self._note(name, stat)
        return True

    def replace(self, name: str, data: bytes) -> None:
        with self._in_a_bucket():
            stat = self._tried(name, lambda: self._upload(name, data))
        if stat is not None:
            self._note(name, stat)

    def get(self, name: str) -> bytes:
        def attempt() -> bytes:
            data: bytes = self._bucket.blob(name).download_as_bytes(
                raw_download=True, checksum="crc32c", timeout=self._timeout_s, retry=None
            )
            return data

        return self._tried(name, attempt)

    def open(self, name: str, start: int, stop: int) -> _Stream:
        return _Stream(self, name, start, stop)

    def stat(self, name: str) -> Stat | None:
        def attempt() -> Stat | None:
            blob = self._bucket.get_blob(name, timeout=self._timeout_s, retry=None)
            return None if blob is None else _stat_of(blob)

        return self._tried(name, attempt)

    def list(self, prefix: str, *, is_deep: bool, most: int | None = None) -> Listing:
        objects: dict[str, Stat] = {}
        folders: dict[str, None] = {}
        token: str | None = None
        size = self._page_size if most is None else most
        while True:
            with self._in_a_bucket():
                page = self._tried(
                    prefix, functools.partial(self._page, prefix, is_deep, size, token)
                )
            objects.update(page.objects)
            folders.update(dict.fromkeys(page.folders))
            token = page.following
            if not token or (most is not None and len(objects) + len(folders) >= most):
                return Listing(objects, tuple(folders))

    def delete(self, name: str) -> None:
        def attempt() -> None:
            with contextlib.suppress(StorageMissing), self._translated(name):
                self._bucket.blob(name).delete(timeout=self._timeout_s, retry=None)

        self._tried(name, attempt)
        with self._lock:
            self._accepted.pop(name, None)

    def confirm(self, prefix: str) -> None:
        with self._lock:
            accepted = {n: s for n, s in self._accepted.items() if n.startswith(prefix)}
        if not accepted:
            return
        found = self.list(prefix, is_deep=True).objects
        for name, expected in accepted.items():
            if found.get(name) != expected:
                raise StorageUnavailable(
                    f"{self.uri}/{name}: it was accepted as {_words(expected)}, and is "
                    f"{_words(found.get(name))}"
                )
        with self._lock:
            for name, expected in accepted.items():
                if self._accepted.get(name) == expected:
                    del self._accepted[name]

    def request(self, start: int, stop: int, name: str) -> requests.Response:
        """Begin to read some bytes. One try."""
        response = self._session.get(
            f"{self._api}/download/storage/v1/b/{self._name}/o/{quote(name, safe='')}",
            params={"alt": "media"},
            headers={"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"},
            stream=True,
            timeout=self._timeout_s,
        )
        if response.status_code == 206 and _range_start(response) == start:
            return response
        with response:
            if response.status_code == 416:
                raise StorageMissing(
                    f"{self.uri}/{name}", f"no byte {start}", f"an object of {stop} bytes"
                )
            if response.status_code == 206:
                found = f"other bytes than {start} to {stop}"
                raise _Passing(f"{self.uri}/{name}", found, Trouble.ALTERED)
            raise self._judged(name, response.status_code, response)

    def tried(self, name: str, act: Callable[[], T]) -> T:
        """What it returns; made again, a bounded number of times, where that may help."""
        return self._tried(name, act)

    def _upload(
        self, name: str, data: bytes, *, if_generation_match: int | None = None
    ) -> Stat | None:
        """Store a small object, one try. None when it is there and must not be.

        The checksum goes before the content: a server that gets other bytes stores nothing.
        """
        blob = self._bucket.blob(name)
        # A public bucket's objects are kept by caches otherwise.
        blob.cache_control = "no-store"
        try:
            blob.upload_from_string(
                data,
                content_type=_TYPE,
                checksum="crc32c",
                if_generation_match=if_generation_match,
                timeout=self._timeout_s,
                retry=None,
            )
        except PreconditionFailed:
            return None
        sent = Stat(len(data), crc_of(data))
        self._compare(name, sent, blob.size, blob.crc32c, blob.generation)
        return sent

    def _send(self, name: str, body: Body) -> Stat | None:
        """Store an object as it is made, one try. None when it is there already."""
        with self._session.post(
            f"{self._api}/upload/storage/v1/b/{self._name}/o",
            params={"uploadType": "media", "name": name, "ifGenerationMatch": "0"},
            # It is sent block by block; the annotation knows fewer kinds of block.
            data=cast(Any, body),
            headers={"Content-Type": _TYPE},
            timeout=self._timeout_s,
        ) as response:
            if response.status_code == 412:
                return None
            if response.status_code != 200:
                raise self._judged(name, response.status_code, response)
            try:
                answer = response.json()
                found = [answer[key] for key in ("size", "crc32c", "generation")]
            except (requests.exceptions.JSONDecodeError, KeyError, TypeError) as error:
                words = "an answer without size and crc32c"
                raise _Passing(f"{self.uri}/{name}", words, Trouble.ALTERED) from error
        sent = Stat(len(body), body.crc)
        self._compare(name, sent, *found)
        return sent

    def _compare(self, name: str, sent: Stat, size: Any, crc: Any, generation: Any) -> None:
        try:
            found = Stat(int(size), _crc(str(crc)))
        except ValueError:
            found = None
        if found == sent:
            return
        # It is no use to anybody, and would be taken for another writer's.
        with contextlib.suppress(GoogleAPICallError):
            self._bucket.blob(name).delete(
                if_generation_match=generation, timeout=self._timeout_s, retry=None
            )
        words = f"stored as {_words(found)} and sent as {_words(sent)}"
        raise _Passing(f"{self.uri}/{name}", words, Trouble.ALTERED)

    def _page(self, prefix: str, is_deep: bool, size: int, token: str | None) -> _Page:
        pages = self._client.list_blobs(
            self._bucket,
            prefix=prefix,
            delimiter=None if is_deep else "/",
            page_size=size,
            page_token=token,
            fields="items(name,size,crc32c),prefixes,nextPageToken",
            timeout=self._timeout_s,
            retry=None,
        )
        page = next(pages.pages, ())
        return _Page(
            objects={str(blob.name): _stat_of(blob) for blob in page},
            folders=tuple(sorted(str(folder) for folder in pages.prefixes)),
            following=pages.next_page_token,
        )

    def _note(self, name: str, stat: Stat) -> None:
        with self._lock:
            self._accepted[name] = stat

    def _tried(self, name: str, act: Callable[[], T]) -> T:
        retrying = tenacity.Retrying(
            stop=self._is_enough,
            wait=self._wait_s,
            retry=tenacity.retry_if_exception_type(_Passing),
            reraise=True,
        )

        def attempt() -> T:
            with self._translated(name):
                return act()

        return retrying(attempt)

    def _is_enough(self, state: tenacity.RetryCallState) -> bool:
        passing = _passing(state)
        asked = passing.retry_after_s or 0.0
        limit = self._patience[passing.trouble].attempts
        return state.attempt_number >= limit or asked > RETRY_AFTER_MAX_S

    def _wait_s(self, state: tenacity.RetryCallState) -> float:
        passing = _passing(state)
        patience = self._patience[passing.trouble]
        draw = random_exponential(patience.first_s, patience.most_s)
        # The draw on top: all who were told the same do not come at once.
        return (passing.retry_after_s or 0.0) + draw(state)

    @contextlib.contextmanager
    def _translated(self, name: str) -> Generator[None, None, None]:
        try:
            yield
        except EverstepError:
            raise
        except (
            GoogleAPICallError,
            GoogleAuthError,
            InvalidResponse,
            DataCorruption,
            requests.RequestException,
            urllib3.exceptions.HTTPError,
            OSError,
        ) as error:
            raise self._translation(name, error) from error

    def _translation(self, name: str, error: Exception) -> EverstepError:
        where = f"{self.uri}/{name}"
        if isinstance(error, GoogleAPICallError) and error.code is not None:
            return self._judged(name, int(error.code), error.response, str(error.message))
        if isinstance(error, InvalidResponse):
            return self._judged(name, error.response.status_code, error.response)
        if isinstance(error, GoogleAuthError):
            if isinstance(error, TransportError) or error.retryable:
                return _Passing(where, f"no new credentials ({error})", Trouble.CONNECTION)
            return StorageRefused(where, f"no new credentials ({error})", _NO_CREDENTIALS)
        if isinstance(error, DataCorruption):
            return _Passing(where, "damaged on the way", Trouble.ALTERED)
        return _Passing(where, f"{type(error).__name__}: {error}", Trouble.CONNECTION)

    def _judged(self, name: str, status: int, response: Any, words: str = "") -> EverstepError:
        where = f"{self.uri}/{name}"
        if status == 404:
            return StorageMissing(where, "nothing", "an object here")
        judged = judge_status(status, words or _body_text(response))
        if isinstance(judged, Trouble):
            asked = retry_after(response.headers.get("Retry-After") if response is not None else "")
            found = f"status {status}"
            return _Passing(where, found, judged, retry_after_s=asked)
        remedy = _NO_CREDENTIALS if status == 401 else judged.remedy
        return StorageRefused(where, judged.found, remedy)

    @contextlib.contextmanager
    def _in_a_bucket(self) -> Generator[None, None, None]:
        """Where an object need not be there, only its bucket can be missing."""
        try:
            yield
        except StorageMissing as error:
            raise StorageRefused(
                self.uri, "no bucket of this name", "a bucket that is there"
            ) from (error)


class _Stream:
    """Some bytes of an object; a connection that is cut is replaced where it ended."""

    def __init__(self, bucket: GcsBucket, name: str, start: int, stop: int) -> None:
        self._bucket, self._name = bucket, name
        self._at, self._stop = start, stop
        self._response: requests.Response | None = None
        self._cuts_left = 32

    def take(self, buffer: Bytes) -> None:
        view = buffer.data
        while view:
            count = self._bucket.tried(self._name, functools.partial(self._some, view))
            self._at += count
            view = view[count:]

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def _some(self, view: memoryview) -> int:
        try:
            if self._response is None:
                self._response = self._bucket.request(self._at, self._stop, self._name)
            count = int(self._response.raw.readinto(view[:_READ_BYTES]))
            if count == 0:
                raise ConnectionError(f"{self._stop - self._at} bytes are missing at the end")
            return count
        except BaseException:
            self.close()
            self._cuts_left -= 1
            if self._cuts_left < 0:
                raise StorageUnavailable(
                    f"{self._bucket.uri}/{self._name}: cut again and again"
                ) from None
            raise


def _credentials(uri: str) -> Any:
    if os.environ.get(_EMULATOR) and not os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return AnonymousCredentials()
    try:
        credentials, _ = google.auth.default(scopes=[_SCOPE])
    except GoogleAuthError as error:
        raise StorageRefused(uri, f"no credentials of Google ({error})", _NO_CREDENTIALS) from error
    return credentials


def _passing(state: tenacity.RetryCallState) -> _Passing:
    error = state.outcome.exception() if state.outcome is not None else None
    if not isinstance(error, _Passing):
        raise InvariantViolated(f"a request is made again after {error!r}")
    return error


def _crc(text: str) -> int:
    """From base64 of the big-endian four bytes."""
    return int.from_bytes(base64.b64decode(text), "big")


def _stat_of(blob: Any) -> Stat:
    return Stat(int(blob.size), _crc(blob.crc32c))


def _words(stat: Stat | None) -> str:
    return "nothing" if stat is None else f"{stat.size} bytes with crc32c {stat.crc:08x}"


def _range_start(response: requests.Response) -> int | None:
    text = response.headers.get("Content-Range", "")
    first = text.removeprefix("bytes ").partition("-")[0]
    return int(first) if first.isdigit() else None


def _body_text(response: Any) -> str:
    if response is None:
        return ""
    with contextlib.suppress(requests.RequestException, urllib3.exceptions.HTTPError, OSError):
        return str(response.text)[:300].strip()
    return ""
