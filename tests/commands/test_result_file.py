"""Where logits may be saved, and that what is there survives all that can go wrong."""

from __future__ import annotations

import os
import resource
import socket
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from strata_cli.commands.main import run, strata
from strata_cli.commands.result_file import ResultFile, check_distinct, check_result_file
from strata_cli.engine.engine import Engine
from strata_cli.errors import ConfigError, InputError, StrataError

LOGITS = np.arange(6, dtype=np.float32).reshape(2, 3)


def check(path: object, **inputs: str) -> ResultFile:
    return check_result_file("--logits-out", str(path), inputs)


def test_a_new_file_has_the_array_and_the_mode_that_any_new_file_gets(tmp_path: Path) -> None:
    path = tmp_path / "new.npy"
    file = check(path)
    assert not list(tmp_path.iterdir())  # a check leaves nothing behind
    file.save_logits(LOGITS)
    (tmp_path / "plain").touch()
    assert np.array_equal(np.load(path), LOGITS)
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert {entry.name for entry in tmp_path.iterdir()} == {"new.npy", "plain"}


def test_the_bytes_are_those_of_numpy(tmp_path: Path) -> None:
    for name, array in (("one", LOGITS[0]), ("two", LOGITS), ("turned", LOGITS.T)):
        check(tmp_path / name).save_logits(array)
        np.save(tmp_path / "expected.npy", np.ascontiguousarray(array))
        assert (tmp_path / name).read_bytes() == (tmp_path / "expected.npy").read_bytes()


def test_an_old_file_keeps_its_mode_and_its_neighbours(tmp_path: Path) -> None:
    path, neighbour = tmp_path / "old.npy", tmp_path / "old.npy.partial"
    path.write_text("old")
    path.chmod(0o640)
    neighbour.write_text("somebody's")
    check(path).save_logits(LOGITS)
    assert np.array_equal(np.load(path), LOGITS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert neighbour.read_text() == "somebody's"


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "target.npy", tmp_path / "link.npy"
    if exists:
        target.write_text("old")
    link.symlink_to(target)
    check(link).save_logits(LOGITS)
    assert link.is_symlink()
    assert np.array_equal(np.load(target), LOGITS)
    assert [entry.name for entry in target.parent.iterdir()] == ["target.npy"]


def test_a_device_is_written_and_stays_a_device(tmp_path: Path) -> None:
    link = tmp_path / "null"
    link.symlink_to(os.devnull)
    for path in (os.devnull, link):
        check(path).save_logits(LOGITS)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_pipe_gets_the_whole_array(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", np.zeros((40, 999), np.float32)
    os.mkfifo(pipe)
    # To a file: a pipe that is read only when all is written might be too small.
    with (
        (tmp_path / "output").open("wb") as output,
        subprocess.Popen(["cat", str(pipe)], stdout=output) as reader,
    ):
        check(pipe).save_logits(large)
        assert reader.wait(timeout=20) == 0
    np.save(tmp_path / "expected.npy", large)
    assert (tmp_path / "output").read_bytes() == (tmp_path / "expected.npy").read_bytes()
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "must be the path of a file, got ''"),
        ("-", "- is none, and stdout is where the result goes"),
        ("~nosuchuser/x", "that user has no home folder here"),
        ("/", "Is a directory"),
        ("{tmp}", "Is a directory"),
        ("{tmp}/..", "Is a directory"),
        ("{tmp}/new/", "No such file or directory"),
        ("{tmp}/none/x.npy", "No such file or directory"),
        ("{tmp}/none/../x.npy", "No such file or directory"),
        ("{tmp}/file/x.npy", "Not a directory"),
        ("{tmp}/file/", "Not a directory"),
        ("{tmp}/" + "x" * 256, "File name too long"),
        ("{tmp}/loop", "Too many levels of symbolic links"),
        ("{tmp}/lost", "No such file or directory"),
        ("{tmp}/socket", "No such device or address"),
        ("/proc/x.npy", "No such file or directory"),
    ],
)
def test_a_bad_path_is_an_error_before_the_model_is_opened(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    path: str,
    reason: str,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "lost").symlink_to("none/target")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(tmp_path)  # the path of a socket may not be long
        listener.bind("socket")
    monkeypatch.setattr(Engine, "open", lambda *_, **__: pytest.fail("the model was opened"))
    for flag in ("--logits-out", "--all-logits-out"):
        assert run(strata, ["read", "x", flag, path.format(tmp=tmp_path)]) == 2
        output, error = capsys.readouterr()
        assert output == ""
        assert error.startswith(f"strata: error: {flag}")
        assert reason in error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_without_permission_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "read-only.npy"
    path.touch(0o444)
    with pytest.raises(InputError, match="Permission denied"):
        check(path)
    tmp_path.chmod(0o555)
    with pytest.raises(InputError, match="Permission denied"):
        check(tmp_path / "new.npy")
    tmp_path.chmod(0o755)


@pytest.mark.parametrize("other", ["{tmp}/a.npy", "{tmp}/./a.npy", "{tmp}/link"])
def test_one_file_for_both_is_a_conflict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    path = tmp_path / "a.npy"
    (tmp_path / "link").symlink_to(path)
    args = ["--logits-out", str(path), "--all-logits-out", other.format(tmp=tmp_path)]
    assert run(strata, ["read", "x", *args]) == 2
    assert "--logits-out and --all-logits-out are the same file" in capsys.readouterr().err
    check_distinct({"--one": str(path), "--other": str(tmp_path / "b.npy")})
    check_distinct({"--one": os.devnull, "--other": os.devnull})


def test_an_input_is_not_overwritten(tmp_path: Path) -> None:
    model, link = tmp_path / "m.gguf", tmp_path / "link"
    model.write_text("weights")
    link.symlink_to(model)
    with pytest.raises(ConfigError, match="is the model"):
        check(link, model=str(model))
    check(tmp_path / "new", model=str(model), prompt=str(tmp_path / "none"))


def files_read(tmp_path: Path) -> dict[str, list[str]]:
    """Files that a run reads, and the arguments that make it read them."""
    files = ["config.toml", "prompt.txt", "ids.json", "m-00001-of-00002.gguf"]
    for name in [*files, "m-00002-of-00002.gguf"]:
        (tmp_path / name).touch()
    config, prompt, ids, shard = (str(tmp_path / name) for name in files)
    return {
        "config.toml": ["x", "--config", config],
        "prompt.txt": ["--file", prompt],
        "ids.json": ["--tokens-file", ids],
        "m-00001-of-00002.gguf": ["x", "--model", shard],
        "m-00002-of-00002.gguf": ["x", "--model", shard],
    }


@pytest.mark.parametrize("flag", ["--logits-out", "--all-logits-out"])
def test_no_file_that_a_run_reads_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    for name, args in files_read(tmp_path).items():
        assert run(strata, ["read", *args, flag, str(tmp_path / name)]) == 2
        assert "which this would overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stream", "what"),
    [("stdin", "prompt on stdin"), ("stdout", "where the result goes"), ("stderr", "messages go")],
)
def test_no_standard_stream_that_is_a_file_is_overwritten(
    tmp_path: Path, stream: str, what: str
) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    command = [sys.executable, "-m", "strata_cli", "read", "-", "--logits-out", str(path)]
    with path.open("r" if stream == "stdin" else "a") as file:
        files = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ended = subprocess.run(command, **{**files, stream: file}, check=False)  # type: ignore[call-overload]  # streams by name
    assert ended.returncode == 2
    assert what in (path.read_text() if stream == "stderr" else ended.stderr.decode())
    assert path.read_text().startswith("x")


def test_a_home_folder_is_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setenv("HOME", str(tmp_path))

    def see(_flag: str, path: str, _inputs: object) -> None:
        seen.append(path)
        raise InputError("seen")

    monkeypatch.setattr("strata_cli.commands.read.check_result_file", see)
    for path in ("~/x.npy", "~/new/"):
        assert run(strata, ["read", "x", f"--logits-out={path}"]) == 2
    assert seen == [f"{tmp_path}/x.npy", f"{tmp_path}/new/"]


@pytest.mark.parametrize("old", ["old", None])
def test_a_full_disk_is_named_and_leaves_everything_as_it_was(
    tmp_path: Path, old: str | None
) -> None:
    path = tmp_path / "x.npy"
    if old:
        path.write_text(old)
    file = check(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(StrataError) as caught:
            file.save_logits(np.zeros(9999, np.float32))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.message == f"cannot write {path}: File too large"
    assert caught.value.exit_code == 1
    assert [entry.name for entry in tmp_path.iterdir()] == (["x.npy"] if old else [])
    assert not old or path.read_text() == old


def test_a_full_device_is_named() -> None:
    with pytest.raises(StrataError, match="cannot write /dev/full: No space left on device"):
        check("/dev/full").save_logits(LOGITS)


def test_an_interrupt_while_writing_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = check(tmp_path / "x.npy")

    def interrupted(*_: object) -> None:
        assert len(list(tmp_path.iterdir())) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr("strata_cli.commands.result_file._write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        file.save_logits(LOGITS)
    assert not list(tmp_path.iterdir())
