"""Files that users name: replaced whole, links followed, pipes written as they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import pytest

from strata_cli.output_files import replace_file, target_of


def test_a_link_names_what_it_leads_to_even_where_nothing_is_yet(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("new")
    assert target_of(str(tmp_path / "link")) == str(tmp_path / "new")


def test_what_is_no_regular_file_has_no_target(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    assert target_of(str(tmp_path / "pipe")) is None
    assert target_of(str(tmp_path / "link")) is None
    assert target_of(str(tmp_path)) is None


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def half(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        replace_file(str(tmp_path / "file"), half)
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"
