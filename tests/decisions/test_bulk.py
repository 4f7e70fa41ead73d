"""Bulk runs: a row for each line, in order, whatever ends a run and however often."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from strata_cli.decisions import bulk_input
from strata_cli.decisions.bulk import BulkCounts
from strata_cli.decisions.bulk_input import count_lines, parse_line, read_lines
from strata_cli.decisions.bulk_output import BulkOutput
from strata_cli.decisions.states import state_text
from strata_cli.errors import InputError, StrataError
from tests.decisions.stub_answers import JOB, answer_file

COMMAND = [sys.executable, "-m", "tests.decisions.stub_answers"]


def write_states(path: Path, count: int) -> Path:
    path.write_bytes(b"".join(b'{"state":"state %d","id":%d}\n' % (i, i) for i in range(count)))
    return path


def test_lines_are_numbered_and_the_last_may_lack_its_end() -> None:
    file = io.BytesIO(b"a\n\nb")
    assert count_lines(file) == 3
    assert [(one.number, one.offset, one.data) for one in read_lines(file)] == [
        (1, 0, b"a"),
        (2, 2, b""),
        (3, 3, b"b"),
    ]
    assert len({one.digest for one in read_lines(io.BytesIO(b"a\nb\na"))}) == 2


def test_a_line_too_long_to_keep_is_told_apart_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bulk_input, "MOST_LINE_BYTES", 4)
    long, after = read_lines(io.BytesIO(b"0123456789abc\nxyz\n"))
    assert (long.data, after.data, after.offset) == (None, b"xyz", 14)
    other, _ = read_lines(io.BytesIO(b"0123456789abd\nxyz\n"))
    assert long.digest != other.digest
    assert [one.data for one in read_lines(io.BytesIO(b"0123\n"))] == [b"0123"]
    with pytest.raises(InputError, match="longer than"):
        parse_line(long.data)


def test_states_are_texts_chats_or_objects() -> None:
    assert parse_line(b'{"state": "s", "id": 7}')[:2] == ("s", 7)
    chat = b'{"state": [{"role": "user", "content": "hi"}, {"role": "bot", "content": "yo"}]}'
    assert parse_line(chat).state == "user: hi\nbot: yo"
    assert parse_line('{"state": {"a": "é"}}'.encode()).state == '{\n  "a": "é"\n}'
    parts = [{"role": "user", "content": ["hi"]}]  # contents that are no text: one form everywhere
    assert parse_line(json.dumps({"state": parts}).encode()).state == state_text(parts)
    assert '"hi"' in state_text(parts)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "the line is empty"),
        (b"{", "not valid JSON"),
        (b'{"state": "\xff"}', "not valid JSON"),
        (b"[1]", "not an object"),
        (b'{"state": "x", "state": "x"}', "the key 'state' is there twice"),
        (b"{}", "state is missing"),
        (b'{"state": null}', "state is missing"),
        (b'{"state": 3}', "state is neither text nor list nor object: '3'"),
        (b'{"state": " "}', "the state is empty"),
        (b'{"state": "s", "id": true}', "id is neither text nor number"),
        (b'{"state": NaN}', "not valid JSON"),
    ],
)
def test_what_is_wrong_with_a_line_is_told(line: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_line(line)


def test_rows_are_in_order_and_say_what_decide_says(tmp_path: Path) -> None:
    states, rows = write_states(tmp_path / "in", 20), tmp_path / "out"
    assert answer_file(states, rows) == BulkCounts(0, 20, 0)
    found = [orjson.loads(row) for row in rows.read_bytes().splitlines()]
    assert [(row["line"], row["id"]) for row in found] == [(i + 1, i) for i in range(20)]
    assert {row["run"] for row in found} == {JOB.key}
    answer = found[3]["questions"]["which"]
    assert found[3]["abstained"] == (["which"] if answer["confidence"] < 0.9 else [])
    assert answer["distribution"]["a"] + answer["distribution"]["b"] == 1
    assert answer_file(states, rows) == BulkCounts(20, 0, 0)


def test_a_run_killed_again_and_again_leaves_the_bytes_of_one_undisturbed(tmp_path: Path) -> None:
    states = write_states(tmp_path / "in", 10_000)
    answer_file(states, tmp_path / "undisturbed")
    rows, rng, seen = tmp_path / "rows", random.Random(7), set()
    for _ in range(3):
        with subprocess.Popen([*COMMAND, str(states), str(rows)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.read(rng.randrange(1, 2500))
            child.kill()
        size = rows.stat().st_size
        with rows.open("r+b") as file:  # a crash of the machine loses some of the end as well
            file.truncate(size - rng.randrange(min(size, 3000)))
        seen.add(rows.stat().st_size)
    assert len(seen) == 3
    counts = answer_file(states, rows)
    assert 0 < counts.resumed < 10_000
    assert counts.resumed + counts.added == 10_000
    assert rows.read_bytes() == (tmp_path / "undisturbed").read_bytes()


@pytest.mark.parametrize("lost", [1, 2, 40, 200])
def test_a_row_cut_short_is_written_again(tmp_path: Path, lost: int) -> None:
    states, rows = write_states(tmp_path / "in", 3), tmp_path / "rows"
    answer_file(states, rows)
    whole = rows.read_bytes()
    for tail in (b"", b"\0" * 9):
        rows.write_bytes(whole[:-lost] + tail)
        assert answer_file(states, rows) == BulkCounts(2, 1, 0)
        assert rows.read_bytes() == whole


def test_an_interrupt_loses_nothing(tmp_path: Path) -> None:
    states, rows = write_states(tmp_path / "in", 9), tmp_path / "rows"

    def interrupt(_resumed: int, added: int) -> None:
        if added == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_file(states, rows, progress=interrupt)
    assert answer_file(states, rows) == BulkCounts(4, 5, 0)


def test_bad_lines_stop_a_run_or_are_told_in_their_rows(tmp_path: Path) -> None:
    states, rows = tmp_path / "in", tmp_path / "rows"
    states.write_bytes(b'{"state": "a"}\nnonsense\n{"state": "refuse"}\n{"state": "b"}\n')
    with pytest.raises(InputError, match="line 2: not valid JSON") as caught:
        answer_file(states, rows)
    assert caught.value.hint.startswith("each line is one object")
    skipped: list[tuple[int, str]] = []
    counts = answer_file(
        states, rows, skip=lambda number, problem: skipped.append((number, problem.message))
    )
    assert counts == BulkCounts(1, 3, 2)
    assert [number for number, _ in skipped] == [2, 3]
    found = [orjson.loads(row) for row in rows.read_bytes().splitlines()]
    assert [row.get("error") is None for row in found] == [True, False, False, True]
    assert found[2]["error"] == "no answer to this"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"a letter" + data, "its line 1 is no row of such a run"),
        (lambda data: data[1:20], "its line 1 is no row of such a run"),
        (lambda data: b"{}\n" + data, "its line 1 is no row of such a run"),
        (lambda data: data.replace(b"\n", b" \n", 1), "its row 1 does not end as rows do"),
        (lambda data: data + data, "it has a row 4, and the input has 3 lines"),
        (lambda data: data[data.index(b"\n") + 1 :], "its row 1 answers another line than"),
        (lambda data: data.replace(b'"run":"', b'"run":"0', 1), "another model, device or version"),
        (lambda data: data.replace(b"-", b"-0", 1), "written with another set of questions"),
        (
            lambda data: data.replace(b'","id', b'0","id', 1),
            "written with another level, prior, calibration or threshold",
        ),
    ],
)
def test_an_output_of_something_else_is_refused_and_stays(
    tmp_path: Path, change: object, message: str
) -> None:
    states, rows = write_states(tmp_path / "in", 3), tmp_path / "rows"
    answer_file(states, rows)
    assert callable(change)
    rows.write_bytes(change(rows.read_bytes()))
    before = rows.read_bytes()
    with pytest.raises(InputError, match=message):
        answer_file(states, rows)
    assert rows.read_bytes() == before


def test_an_input_that_changed_is_refused(tmp_path: Path) -> None:
    states, rows = write_states(tmp_path / "in", 3), tmp_path / "rows"
    answer_file(states, rows)
    states.write_bytes(states.read_bytes().replace(b"state 1", b"state x"))
    with pytest.raises(InputError, match="its row 2 answers another line than the input's line 2"):
        answer_file(states, rows)


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    with BulkOutput(tmp_path / "rows", "k"), pytest.raises(InputError, match="another run is"):
        BulkOutput(tmp_path / "rows", "k")
    BulkOutput(tmp_path / "rows", "k").close()


def test_a_full_disk_is_an_error_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = write_states(tmp_path / "in", 3)

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(StrataError, match="No space left") as caught:
        answer_file(states, tmp_path / "rows")
    assert caught.value.exit_code == 1
