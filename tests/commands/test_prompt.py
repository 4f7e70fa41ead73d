"""Where a prompt comes from, and what is said where it does not come."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from strata_cli.commands import prompt
from strata_cli.commands.prompt import PromptSource, argument_text, parse_ids
from strata_cli.errors import InputError


def source(
    text: str | None = None,
    file: Path | None = None,
    tokens: str | None = None,
    tokens_file: Path | None = None,
) -> PromptSource:
    return PromptSource(
        text=text,
        file=file,
        tokens=tokens,
        tokens_file=tokens_file,
        raw=True,
        chat=False,
        system=None,
    )


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize(
    "given", [source(), source(text="-"), source(file=Path("-"))], ids=["none", "text", "file"]
)
def test_a_dash_reads_text_from_stdin(given: PromptSource, monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, "näher".encode())
    given.check()
    assert given.is_from_stdin()
    assert given.read() == "näher"


def test_a_dash_reads_ids_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, b"[1, 2, 3]")
    given = source(tokens_file=Path("-"))
    assert given.is_from_stdin()
    assert given.read() == [1, 2, 3]
    feed(monkeypatch, b"[1, 2")
    with pytest.raises(InputError, match="stdin is not valid JSON"):
        given.read()


def test_a_file_named_dash_is_read_by_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "-"
    path.write_text("from the file")
    assert not source(file=path).is_from_stdin()
    assert source(file=path).read() == "from the file"


@pytest.mark.parametrize("given", [source(text=""), source(file=Path("/dev/null"))])
def test_an_empty_prompt_is_refused(given: PromptSource) -> None:
    with pytest.raises(InputError, match="the prompt is empty"):
        given.read()


@pytest.mark.parametrize("name", ["x" * 256, "a\0b", "none/x"])
@pytest.mark.parametrize("option", ["file", "tokens_file"])
def test_a_file_that_cannot_be_is_one_error(name: str, option: str, tmp_path: Path) -> None:
    path = tmp_path / name
    given = source(file=path) if option == "file" else source(tokens_file=path)
    with pytest.raises(InputError, match="cannot read") as caught:
        given.read()
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 300
    assert caught.value.hint


def test_what_has_no_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "MOST_BYTES", 5 << 20)
    with pytest.raises(InputError, match="/dev/zero has more than 5 MiB of input"):
        source(file=Path("/dev/zero")).read()
    with open("/dev/zero") as endless:
        monkeypatch.setattr("sys.stdin", endless)
        with pytest.raises(InputError, match="stdin has more than 5 MiB of input"):
            source(text="-").read()


def test_a_long_file_is_read_whole(tmp_path: Path) -> None:
    text = "all of it, " * 250_000
    (tmp_path / "long").write_text(text)
    assert source(file=tmp_path / "long").read() == text


def test_ids_are_read_as_written() -> None:
    assert parse_ids("0,7,007,18446744073709551615", "--tokens") == [0, 7, 7, 2**64 - 1]


@pytest.mark.parametrize(
    "part", ["1_0", "٣", "+1", " 1", "1 ", "-1", "", "1.0", "0x1", "²", "9" * 21]
)
def test_an_id_is_plain_digits(part: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_ids(f"5,{part}", "--tokens")
    assert caught.value.message.startswith("--tokens must be whole numbers with commas between")
    assert repr(part) in caught.value.message


def test_a_very_long_id_is_cut_and_counted() -> None:
    with pytest.raises(InputError) as caught:
        parse_ids("9" * 5000, "--tokens")
    assert "(5000 characters)" in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("text", ["[1.0]", "[1e3]", "[true]", '["1"]', "[18446744073709551616]"])
def test_ids_in_a_file_are_whole_numbers(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    path.write_text(text)
    with pytest.raises(InputError, match="is not a list of whole numbers"):
        source(tokens_file=path).read()


@pytest.mark.parametrize("text", ["[1_0]", "[+1]", "[٣]", "[" * 3000, "[" * 3000 + "]" * 3000])
def test_a_file_of_ids_is_json(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    path.write_text(text)
    with pytest.raises(InputError, match="is not valid JSON"):
        source(tokens_file=path).read()


def test_an_argument_is_utf_8_whatever_the_locale() -> None:
    assert argument_text("näher", "PROMPT") == "näher"
    in_ascii = "näher".encode().decode("ascii", "surrogateescape")
    assert argument_text(in_ascii, "PROMPT") == "näher"
    with pytest.raises(InputError, match="--system is not UTF-8 text: byte 0xff at offset 3"):
        argument_text("ä.\udcff", "--system")
