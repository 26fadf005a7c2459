"""The server's routes, as far as the client calls them. Names of models were checked; the rest is quoted."""

from __future__ import annotations

from urllib.parse import quote

API = "/api/v1"
MODELS = f"{API}/models"
EXCHANGES = f"{API}/exchanges"
ROLLOUTS = f"{API}/rollouts"
JOBS = f"{API}/jobs"


def model(project: str, name: str) -> str:
    return f"{MODELS}/{quote(project, safe='')}/{quote(name, safe='')}"


def under(base: str, *parts: object) -> str:
    return "/".join([base, *(quote(str(part), safe="") for part in parts)])
