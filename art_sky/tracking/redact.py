"""Keeps secrets out of what is sent to somebody's dashboard (rule R5)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

REDACTED = "(redacted)"
_SECRET_WORDS = {
    "apikey", "auth", "authorization", "bearer", "cookie", "credential", "credentials", "dsn", "key", "passphrase",
    "passwd", "password", "pat", "private", "secret", "secrets", "token",
}  # fmt: skip
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_KNOWN_FORMS = re.compile(
    r"\b(?:sk-|hf_|ghp_|gho_|github_pat_|xox[abp]-|AKIA|ASIA|AIza)[A-Za-z0-9_-]{12,}"  # by their prefix
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*"
)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_SHORTEST = 8  # of an environment value that is looked for; shorter ones are no secrets and match too much


def redact(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which texts that are, or may be, secrets are replaced.

    Secret is a text under a name with a word such as `key`, `token` or `password` (`max_tokens` is none, and
    numbers never are), a text of a known form, a login in a URL, and every value of an environment variable
    with such a name, wherever it appears.
    """
    values = [v for name, v in os.environ.items() if _is_secret_name(name) and len(v) >= _SHORTEST]
    return {str(k): _clean(str(k), v, sorted(values, key=len, reverse=True)) for k, v in config.items()}


def _clean(name: str, value: Any, environment: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _clean(str(k), v, environment) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(name, v, environment) for v in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    if _is_secret_name(name):
        return REDACTED
    text = str(value)
    for secret in environment:
        text = text.replace(secret, REDACTED)
    return _URL_LOGIN.sub(REDACTED, _KNOWN_FORMS.sub(REDACTED, text))


def _is_secret_name(name: str) -> bool:
    return any(word.lower() in _SECRET_WORDS for word in _WORDS.findall(name))
