"""`python -m art_sky.inference.vllm_keeper FD FOLDER COMMAND...`: runs a command that must not outlive its server.

vLLM is several processes and knows nothing of ours. The keeper leads their process group and holds the reading end
of a pipe, FD, whose other end only the server has: when that closes, however the server ended, the group is
ended, first kindly, and FOLDER, where the sockets are, deleted. The keeper's exit code is the command's (128 + n for
signal n).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

KIND_SECONDS = 5.0  # vLLM takes 2.3 s to end (measured)


def main() -> None:
    # A handler, not SIG_IGN, which the command would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    fd, folder, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    os.set_inheritable(fd, False)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    ending = threading.Event()
    watch = threading.Thread(target=_end_with_server, args=(fd, folder, process, ending), daemon=True)
    watch.start()
    code = process.wait()
    if ending.is_set():
        watch.join()  # it ends this process too
    os._exit(code if code >= 0 else 128 - code)


def _end_with_server(fd: int, folder: str, process: subprocess.Popen[bytes], ending: threading.Event) -> None:
    while os.read(fd, 1):  # nobody writes: it returns when the pipe is closed
        pass
    ending.set()
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + KIND_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # itself included, and what the command left


if __name__ == "__main__":
    main()
