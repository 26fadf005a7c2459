"""The base model's tokenizer and the facts of its folder that text needs, without torch in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from art_sky.errors import InvalidConfig

DEFAULT_CONTEXT = 8192


class Vocabulary:
    """Text to token ids and back. All methods may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidConfig when the folder lacks `tokenizer.json`, which every fast tokenizer has."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise InvalidConfig(f"{folder} has no tokenizer.json; save the model with its fast tokenizer there")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._config = _json(folder / "tokenizer_config.json")
        model, generation = _json(folder / "config.json"), _json(folder / "generation_config.json")
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials: dict[str, int] = {t.content: id for id, t in added.items() if t.special}
        self.chat_template = _chat_template(folder, self._config)
        self.max_context = int(model.get("max_position_embeddings") or DEFAULT_CONTEXT)
        self.end_ids = self._end_ids(generation) or self._end_ids(model) or self._end_ids(self._config)
        self._byte_level = "ByteLevel" in repr(self._tokenizer.decoder)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens in it are recognised, none are added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """Text of `ids` without special tokens; incomplete UTF-8 becomes U+FFFD."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def token_text(self, id: int) -> str:
        return str(self._tokenizer.decode([id], skip_special_tokens=False))

    def token_bytes(self, id: int) -> list[int]:
        """The bytes of one token, also where they are no whole characters."""
        token = self._tokenizer.id_to_token(id) or ""
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return [int(token[3:5], 16)]
        if self._byte_level and token not in self.specials and all(c in _BYTE_OF for c in token):
            return [_BYTE_OF[c] for c in token]
        return list(self.token_text(id).encode("utf-8", "replace"))

    def template_variables(self) -> dict[str, str]:
        """`bos_token` and its kind, as chat templates use them."""
        found = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = self._config.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                found[name] = value
        return found

    def _end_ids(self, config: dict[str, Any]) -> list[int]:
        value = config.get("eos_token_id")
        if value is None and isinstance(config.get("eos_token"), (str, dict)):
            text = config["eos_token"]
            value = self.specials.get(text["content"] if isinstance(text, dict) else text)
        return [int(v) for v in (value if isinstance(value, list) else [value]) if v is not None]


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as e:
        raise InvalidConfig(f"{file} is not JSON ({e}); fetch the model again") from e
    return value if isinstance(value, dict) else {}


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):  # several named ones
        value = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}.get("default")
    return value if isinstance(value, str) else None


def _bytes_to_characters() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _bytes_to_characters()
