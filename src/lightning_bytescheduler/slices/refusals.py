"""What a source says when asking again does not help: that a reader lacks rights, or a certificate, or asks wrongly."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping

from lightning_bytescheduler.checks import is_whole
from lightning_bytescheduler.slices.urls import is_http, local_path

__all__ = ["refusal_of"]

_UNAUTHORIZED, _FORBIDDEN, _MISSING, _PROXY = 401, 403, 404, 407
_PASSING = (_MISSING, 408, 416, 425, 429)  # a missing file may be a folder that is not mounted yet
_WITHOUT_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError")  # botocore's
_HEADER = "storage_options={'headers': {'Authorization': 'Bearer TOKEN'}}"


def refusal_of(error: BaseException, url: str) -> tuple[str, str] | None:
    """What a source says that refuses to be read, and the way out; None if asking again may help.

    Args:
        error: What was raised when it was asked.
        url: Of the source.
    """
    for cause in _chain(error):
        status = _status(cause)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"its certificate is not trusted here ({_short(cause)})",
                "For one that was made by yourself, set the environment variable SSL_CERT_FILE to the file of it; "
                "its subjectAltName must have the host of the URL.",
            )
        if isinstance(cause, ssl.SSLError):
            return _short(cause), "Check whether the URL should begin with http:// rather than https://."
        if status in (_UNAUTHORIZED, _FORBIDDEN, _PROXY):
            return f"{status} {_short(cause)}", _rights(url, listing=status == _FORBIDDEN)
        if isinstance(cause, PermissionError) or type(cause).__name__ in _WITHOUT_CREDENTIALS:
            return _short(cause), _rights(url, listing=False)
        if status is not None and 400 <= status < 500 and status not in _PASSING:
            return f"{status} {_short(cause)}", "Check the URL and storage_options."
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from: fsspec calls much of it a file that is not found."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _status(error: BaseException) -> int | None:
    """The status of HTTP that the libraries behind fsspec know, each in a place of its own."""
    if hasattr(error, "status"):  # aiohttp, whose code is deprecated
        found = error.status
    elif hasattr(error, "response"):  # botocore and huggingface_hub
        response = error.response
        inside = response.get("ResponseMetadata") if isinstance(response, Mapping) else None
        found = inside.get("HTTPStatusCode") if isinstance(inside, Mapping) else getattr(response, "status_code", None)
    else:
        found = getattr(error, "code", None)  # gcsfs
    return found if is_whole(found) else None


def _rights(url: str, *, listing: bool) -> str:
    if local_path(url) is not None:
        return "Change the rights of the file, or read it as another user."
    if not is_http(url):
        return (
            "Give its credentials in storage_options, such as {'key': ..., 'secret': ...} for s3 or "
            "{'token': ...} for gs and hf; or check that they may read it."
        )
    words = f"Send the header that it asks for, as {_HEADER}; if you do, the token is not the right one."
    if listing:
        words += " If only the listing of a folder is forbidden, give the URL of the index in it, .../slices.index."
    return words


def _short(error: BaseException) -> str:
    return str(getattr(error, "message", None) or error) or type(error).__name__
