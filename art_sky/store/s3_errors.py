"""What the errors of botocore mean for a store, and in one line what to do about them."""

from __future__ import annotations

import os
from typing import Any, Literal

import botocore.exceptions as aws
import urllib3.exceptions

from art_sky.errors import NoDiskSpace, StoreError
from art_sky.node.records import RENTED
from art_sky.store.s3_location import Location


class BrokenBody(Exception):
    """Bytes that arrived short, too long or changed; asked for again they may be right."""


# Everything that a call may raise because of the server, the network or the login. A redirection that does not name
# the bucket's region sends botocore to the same place again until Python stops it (RecursionError); for a login whose
# time is over and that has no newer one it raises a plain RuntimeError.
CALL_ERRORS = (aws.BotoCoreError, aws.ClientError, urllib3.exceptions.HTTPError, OSError, BrokenBody, RuntimeError)

Kind = Literal[
    "absent",  # there is no such object
    "refused",  # a precondition did not hold, or so it is said: it may be an earlier try of our own that changed it
    "passing",  # no answer, or one that says: later. A write may have been made all the same
    "final",  # asked again it will be the same
]

_ABSENT = {"NoSuchKey", "NoSuchVersion"}
_REFUSED = {"PreconditionFailed", "ConditionalRequestConflict", "OperationAborted"}
_PASSING = {
    "SlowDown", "SlowDownRead", "SlowDownWrite", "InternalError", "ServiceUnavailable", "RequestTimeout", "Busy",
    "RequestTimeoutException", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests",
    "BandwidthLimitExceeded", "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody", "InvalidRange",
    "XAmzContentChecksumMismatch", "ContentSHA256Mismatch",
}  # fmt: skip
_FULL = {"XMinioStorageFull", "QuotaExceeded", "InsufficientStorage", "EntityTooLarge", "TotalQuotaExceeded"}
_WRONG_LOGIN = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "NotSignedUp"}
_EXPIRED_LOGIN = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "RequestExpired"}
_ELSEWHERE = {"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraint"}

_NO_LOGIN = (
    aws.NoCredentialsError,
    aws.PartialCredentialsError,
    aws.CredentialRetrievalError,
    aws.SSOError,
    aws.ConfigNotFound,
    aws.ConfigParseError,
    aws.InvalidConfigError,
)
_FINAL_ERRORS = (
    *_NO_LOGIN,
    RuntimeError,
    aws.ParamValidationError,
    aws.ProxyConnectionError,
    aws.UnsupportedSignatureVersionError,
)


def kind_of(error: BaseException) -> Kind:
    if not isinstance(error, aws.ClientError):
        certificate = isinstance(error, aws.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error)
        final = certificate or isinstance(error, _FINAL_ERRORS) or _in_circles(error)
        return "final" if final else "passing"
    code, status = code_of(error), status_of(error)
    if code in _ABSENT:
        return "absent"
    if code in _REFUSED or status == 412:
        return "refused"
    if code in _FULL or status == 501:
        return "final"
    if code in _PASSING or status == 429 or status >= 500 or _cut_short(error):
        return "passing"
    return "final"


def code_of(error: BaseException) -> str:
    """Such as `NoSuchKey`; only digits when the reply had no body."""
    return str(_part(error, "Error").get("Code", "")) if isinstance(error, aws.ClientError) else ""


def status_of(error: BaseException) -> int:
    reply = _part(error, "ResponseMetadata") if isinstance(error, aws.ClientError) else {}
    return int(reply.get("HTTPStatusCode", 0))


def is_expired_login(error: BaseException) -> bool:
    """The server says so, or botocore, before it asks one."""
    return code_of(error) in _EXPIRED_LOGIN or (isinstance(error, RuntimeError) and "still expired" in str(error))


def explained(error: BaseException, what: str, at: Location, name: str) -> StoreError:
    """`what` ("read") was being done to the object `name`. Says nothing of absence: the caller knows that one."""
    said = f"cannot {what} s3://{at.bucket}/{name}: {_said(error)}"
    if code_of(error) in _FULL or status_of(error) == 507:
        return NoDiskSpace(f"{said}; make room in the bucket, then try again; nothing was changed")
    return StoreError(f"{said}; {_next_step(error, at)}")


def _next_step(error: BaseException, at: Location) -> str:
    code, status = code_of(error), status_of(error)
    server = at.endpoint_url or "the endpoint"
    if code == "NoSuchBucket":
        return f"make the bucket {at.bucket!r} (aws s3 mb s3://{at.bucket}), or mend the store's URL"
    if code in _ELSEWHERE or status in (301, 307) or _in_circles(error):
        region = _part(error, "Error").get("Region") or _header(error, "x-amz-bucket-region")
        where = f"?region={region}" if region else "?region=... of the bucket"
        return (
            f"the bucket {at.bucket!r} is in another region or behind another endpoint: add {where} to the store's URL"
        )
    if RENTED in os.environ and (
        is_expired_login(error) or code in _WRONG_LOGIN or status == 403 or isinstance(error, _NO_LOGIN)
    ):
        expired = "the credentials have expired; " if is_expired_login(error) else ""
        return (
            f"{expired}this rented machine needs other rights to the store: renew the credential where it was "
            "launched, or launch again with --store-profile, --store-credential or --node-role"
        )
    if is_expired_login(error):
        return "the credentials have expired: log in again (aws sso login), then try again"
    if code in _WRONG_LOGIN:
        return "these credentials are not known there: check AWS_ACCESS_KEY_ID, AWS_PROFILE and the endpoint"
    if code == "RequestTimeTooSkewed":
        return "set this machine's clock, then try again"
    if status == 403:
        return (
            f"these credentials may not do that: allow s3:ListBucket on {at.bucket!r} and s3:GetObject, s3:PutObject "
            "and s3:DeleteObject on its objects, or use others (AWS_PROFILE, ?profile=)"
        )
    if status == 501:
        return f"{server} does not know this operation: try `art-sky check` on this store, or use another server"
    if isinstance(error, _NO_LOGIN):
        return "log in (aws configure, aws sso login), or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ?profile="
    if isinstance(error, aws.SSLError):
        return "name the authority that signed the server's certificate in AWS_CA_BUNDLE"
    if isinstance(error, aws.EndpointConnectionError | aws.ConnectTimeoutError | aws.ProxyConnectionError):
        return f"check the network and the address ({server}), then try again"
    if kind_of(error) != "final":
        return "the server does not answer as it should: try again later"
    return "mend that, then try again"


def _cut_short(error: aws.ClientError) -> bool:
    """The server said in XML what is wrong, and botocore could not read it. A reply to HEAD never has a body."""
    return code_of(error).isdigit() and "xml" in _header(error, "content-type") and error.operation_name != "HeadObject"


def _in_circles(error: BaseException) -> bool:
    """Redirected without end; botocore may wrap what Python says of it."""
    return isinstance(error, RecursionError) or "maximum recursion depth" in str(error)


def _said(error: BaseException) -> str:
    if isinstance(error, aws.ClientError):
        message = str(_part(error, "Error").get("Message", "")).strip().rstrip(".")
        return f"{code_of(error)} {f'({message[:200]})' if message else f'(status {status_of(error)})'}"
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


def _header(error: BaseException, name: str) -> str:
    return str(_part(error, "ResponseMetadata").get("HTTPHeaders", {}).get(name, ""))


def _part(error: BaseException, name: str) -> dict[str, Any]:
    found = (getattr(error, "response", None) or {}).get(name, {})
    return found if isinstance(found, dict) else {}
