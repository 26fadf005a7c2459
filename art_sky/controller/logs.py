"""Following a log file that may be rotated or cut while it is read."""

from __future__ import annotations

import codecs
import os
from collections import deque
from pathlib import Path
from typing import BinaryIO


class LogTail:
    """Gives the last lines of a file, then whatever is appended, through rotation and truncation.

    `read` never blocks; the caller decides how often to ask. A file that does not exist yet is an empty one.
    """

    def __init__(self, path: Path, last_lines: int) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._skip_to_last = last_lines

    def read(self) -> str:
        """All text since the last call; on the first, the last lines of what is there."""
        first = self._skip_to_last
        text = self._read_open_file()
        if self._was_replaced():
            self._open()
            text += self._read_open_file()
        if first >= 0 and self._file is not None:
            self._skip_to_last = -1
            text = "".join(deque(text.splitlines(keepends=True), maxlen=first))
        return text

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read_open_file(self) -> str:
        if self._file is None:
            return ""
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)  # cut: what is there now is new
        return self._decoder.decode(self._file.read())

    def _was_replaced(self) -> bool:
        """Whether the name leads to another file than the open one. A file moved away is read to its end first."""
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return False
        if self._file is None:
            return True
        held = os.fstat(self._file.fileno())
        return (held.st_dev, held.st_ino) != (now.st_dev, now.st_ino)

    def _open(self) -> None:
        self.close()
        self._decoder.reset()
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError:
            self._file = None
