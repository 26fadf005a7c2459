from __future__ import annotations


class _Store:
    HF_TOKEN_PATH = "~/.cache/huggingface/token"

    def get_credential_file_mounts(self) -> dict[str, str]:
        return {}


cloudflare = coreweave = vastdata = huggingface = _Store()
