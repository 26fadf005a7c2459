"""Following a log through appends, rotation and truncation."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_sky.controller.logs import LogTail


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_last_lines_then_appends(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("one\ntwo\nthree\n")
    tail = LogTail(log, 2)
    assert tail.read() == "two\nthree\n"
    assert tail.read() == ""
    append(log, b"four\nfi")
    assert tail.read() == "four\nfi"
    append(log, b"ve\n")
    assert tail.read() == "ve\n"


def test_no_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("old\n")
    tail = LogTail(log, 0)
    assert tail.read() == ""
    append(log, b"new\n")
    assert tail.read() == "new\n"


def test_a_file_that_appears_later(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "server.log", 10)
    assert tail.read() == ""
    append(tmp_path / "server.log", b"first\n")
    assert tail.read() == "first\n"


def test_rotation_loses_nothing(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("one\n")
    tail = LogTail(log, 10)
    assert tail.read() == "one\n"
    append(log, b"last of the old\n")
    log.rename(tmp_path / "server.log.1")
    append(tmp_path / "server.log.1", b"still the old\n")
    log.write_text("first of the new\n")
    assert tail.read() == "last of the old\nstill the old\nfirst of the new\n"
    append(log, b"more\n")
    assert tail.read() == "more\n"
    tail.close()


def test_truncation_starts_again(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("a long first line\n")
    tail = LogTail(log, 10)
    tail.read()
    log.write_text("short\n")
    assert tail.read() == "short\n"


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=40), cut=st.integers(0, 40))
def test_characters_cut_between_two_reads(tmp_path_factory: pytest.TempPathFactory, text: str, cut: int) -> None:
    log = tmp_path_factory.mktemp("log") / "server.log"
    log.touch()
    tail = LogTail(log, 0)
    tail.read()
    data = text.encode()
    append(log, data[:cut])
    seen = tail.read()
    append(log, data[cut:])
    assert seen + tail.read() == text
    tail.close()
