"""Our side of `store_sync.py`, in a process that imports nothing else.

`_store_sync_client.py ENDPOINT WAY KIND PREFIX FOLDER` does one sync and ends. `_store_sync_client.py ENDPOINT` reads
JSON lists [WAY, KIND, PREFIX, FOLDER], one a line, and answers each with the call's seconds, [wall, CPU].
"""

from __future__ import annotations

import gc
import json
import sys
import time

from art_sky.store import open_store
from art_sky.store.packs import PACK_BELOW, pull_folder, push_folder
from art_sky.store.protocol import Store


def sync(store: Store, way: str, kind: str, prefix: str, folder: str) -> None:
    if way == "up":
        push_folder(store, prefix, folder, pack_below=0 if kind == "unpacked" else PACK_BELOW)
    else:
        pull_folder(store, prefix, folder)


def main(endpoint: str, *once: str) -> None:
    store = open_store(f"s3://bench?endpoint_url={endpoint}")
    if once:
        return sync(store, *once)
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        sync(store, *json.loads(line))
        print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    gc.freeze()  # as `art-sky` does before it ends
