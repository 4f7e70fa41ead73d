from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from strata_cli.engine.model.gguf import open_gguf
from strata_cli.engine.model.metadata import ValueType
from strata_cli.engine.model.quants import QuantType
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.errors import ModelError
from tests.model.gguf_writer import GgufBuilder
from tests.model.oracle import MODELS, ORACLE


@pytest.fixture
def builder() -> GgufBuilder:
    """Three tensors and one key of every kind."""
    builder = GgufBuilder()
    builder.add("general.architecture", ValueType.STRING, "qwen4exp")
    builder.add("small", ValueType.I8, -5)
    builder.add("big", ValueType.U64, 2**63 + 1)
    builder.add("real", ValueType.F64, 0.1)
    builder.add("flag", ValueType.BOOL, True)
    builder.add("flags", ValueType.BOOL, [True, False])
    builder.add("words", ValueType.STRING, ["", "ä", "three"])
    builder.add("numbers", ValueType.I32, [1, -2, 3])
    builder.add_tensor("a", QuantType.F32, (2, 3), np.arange(6, dtype="<f4").tobytes())
    builder.add_tensor("b", QuantType.Q8_0, (3, 2, 64), bytes(range(204)) * 2)
    builder.add_tensor("c", QuantType.F16, (5,), b"0123456789")
    return builder


def refusal(path: Path | str) -> ModelError:
    with pytest.raises(ModelError) as caught:
        open_gguf(path)
    assert caught.value.hint
    assert str(path) in caught.value.message
    return caught.value


def refusal_of(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        open_gguf(path)
    return caught.value


def test_metadata_keeps_values_and_types(builder: GgufBuilder, tmp_path: Path) -> None:
    metadata = open_gguf(builder.write(tmp_path / "m.gguf")).metadata
    assert len(metadata) == 8
    assert metadata["small"] == -5
    assert metadata["big"] == 2**63 + 1
    assert metadata["real"] == 0.1
    assert metadata["flag"] is True
    assert np.asarray(metadata["flags"]).tolist() == [True, False]
    assert metadata["words"] == ["", "ä", "three"]
    assert np.asarray(metadata["numbers"]).tolist() == [1, -2, 3]
    assert str(metadata.entry("numbers")) == "i32[3]"
    assert str(metadata.entry("big")) == "u64"
    assert metadata.entry("absent") is None
    assert "absent" not in metadata


def test_tensors_are_read_only_views_in_numpy_order(builder: GgufBuilder, tmp_path: Path) -> None:
    path = builder.write(tmp_path / "m.gguf")
    with open_gguf(path) as file:
        assert list(file.tensors) == ["a", "b", "c"]
        a, b, c = file.tensors.values()
    assert file.tensors == {}
    file.close()
    assert np.array_equal(a.data.view("<f4"), np.arange(6).reshape(2, 3))
    assert (b.qtype, b.shape, b.data.shape) == (QuantType.Q8_0, (3, 2, 64), (3, 2, 68))
    assert c.data.tobytes() == b"0123456789"
    assert not b.data.flags.writeable
    assert path.read_bytes()[b.start : b.start + b.nbytes] == b.data.tobytes()


@pytest.mark.parametrize("version", [2, 3])
def test_versions_two_and_three_are_read(
    builder: GgufBuilder, tmp_path: Path, version: int
) -> None:
    builder.version = version
    assert len(open_gguf(builder.write(tmp_path / "m.gguf")).tensors) == 3


def test_an_alignment_of_the_file_s_own_is_followed(builder: GgufBuilder, tmp_path: Path) -> None:
    builder.alignment = 256
    builder.add("general.alignment", ValueType.U32, 256)
    file = open_gguf(builder.write(tmp_path / "m.gguf"))
    assert file.tensors["c"].data.tobytes() == b"0123456789"


@pytest.mark.parametrize("name", ["tinyA-q8_0", "tinyA-iq4nl-fused"])
def test_the_gguf_package_sees_the_same_tensors(name: str) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(MODELS[name])
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    ours = open_gguf(MODELS[name]).tensors
    assert list(ours) == list(theirs)
    for tensor_name, info in ours.items():
        their = theirs[tensor_name]
        assert int(info.qtype) == int(their.tensor_type)
        assert list(reversed(info.shape)) == their.shape.tolist()
        assert info.data.tobytes() == their.data.tobytes()


def test_a_full_vocabulary_opens_in_well_under_a_second(tmp_path: Path) -> None:
    builder = GgufBuilder()
    builder.add("tokenizer.ggml.tokens", ValueType.STRING, [f"tok{i}" for i in range(248_320)])
    path = builder.write(tmp_path / "m.gguf")
    start = time.process_time()
    metadata = open_gguf(path).metadata
    opened = time.process_time()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert tokens[-1] == "tok248319"
    assert opened - start < 1
    assert time.process_time() - opened < 1


def test_opening_reads_no_tensor_data(tmp_path: Path) -> None:
    builder = GgufBuilder()
    builder.add_tensor("huge", QuantType.F32, (1 << 18, 1 << 16), b"")
    path = builder.write(tmp_path / "sparse.gguf")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + (1 << 36))
    info = open_gguf(path).tensors["huge"]
    assert info.nbytes == 1 << 36
    assert info.data[-1, -4:].tolist() == [0, 0, 0, 0]


# What is not a model file at all


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "absent.gguf").message


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert "is a directory" in refusal(tmp_path).message


def test_a_device_is_refused() -> None:
    assert "not a regular file" in refusal("/dev/null").message


def test_a_path_that_cannot_be_is_refused() -> None:
    for path in ("x" * 5000, "x" * 256, "a\0b.gguf"):
        error = refusal_of(Path(path))
        assert "cannot be opened" in error.message
        assert error.message.isprintable()
        assert len(error.message) < 300
        assert error.hint


def test_a_file_without_permission_is_refused(
    builder: GgufBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = builder.write(tmp_path / "m.gguf")
    monkeypatch.setattr(Path, "open", deny)
    assert "permission denied" in refusal(path).message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GGU", "not a GGUF file"),
        (b"PK\x03\x04 a zip file", "not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        (b"GGUF", "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4"),
        (b"GGUF" + struct.pack("<IQQ", 0, 0, 0), "version 0"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQ", 3, 0), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 0), "claims 18446744073709551615 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "claims 9223372036854775808 metadata keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1000, 0), "claims 1000 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1000), "claims 1000 metadata keys"),
    ],
)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert message in refusal(path).message


# What is wrong inside

Change = Callable[[GgufBuilder], object]


def wrong_tensor(
    name: str = "x",
    type_id: int = 0,
    shape: tuple[int, ...] = (1,),
    data: bytes = b"0123",
    offset: int | None = None,
) -> Change:
    def change(builder: GgufBuilder) -> None:
        builder.add_tensor(name, type_id, shape, data).offset = offset

    return change


def wrong_value(key: str, kind: ValueType, value: int | float | str) -> Change:
    return lambda builder: builder.add(key, kind, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wrong_tensor(type_id=99), "tensor 'x' has the type 99, which is not supported"),
        (wrong_tensor(type_id=28), r"tensor 'x' has the type 28 \(F64\)"),
        (wrong_tensor(type_id=2**32 - 1), "the type 4294967295"),
        (wrong_tensor(shape=()), "has 0 dimensions"),
        (wrong_tensor(shape=(1, 1, 1, 1, 1)), "has 5 dimensions"),
        (wrong_tensor(shape=(0,)), "impossible shape"),
        (wrong_tensor(shape=(2**63, 2)), "impossible shape"),
        (wrong_tensor(shape=(2**32, 2**31)), "impossible shape"),
        (wrong_tensor(shape=(2**31, 2**31)), "truncated"),
        (wrong_tensor(type_id=8, shape=(33,)), "rows of 33 weights, but Q8_0 stores blocks of 32"),
        (wrong_tensor(offset=2**64 - 32), "truncated"),
        (wrong_tensor(offset=1024), "truncated"),
        (wrong_tensor(offset=500), "no multiple of 32"),
        (wrong_tensor(offset=0), "overlap"),
        (wrong_tensor(name="a"), "'a' appears twice"),
        (wrong_tensor(name="n" * 65), "is 65 bytes long"),
        (wrong_tensor(name=""), "is 0 bytes long"),
        (
            wrong_value("general.alignment", ValueType.U32, 24),
            "power of two and at least 8, got 24",
        ),
        (wrong_value("general.alignment", ValueType.U32, 0), "power of two and at least 8, got 0"),
        (wrong_value("general.alignment", ValueType.I32, 32), "must be u32, found i32"),
        (wrong_value("general.alignment", ValueType.STRING, "32"), "must be u32, found string"),
        (wrong_value("split.count", ValueType.U16, 3), "split.no is missing"),
    ],
)
def test_a_wrong_header_is_refused(
    builder: GgufBuilder, tmp_path: Path, change: Change, message: str
) -> None:
    change(builder)
    path = builder.write(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=message):
        open_gguf(path)


def replaced(builder: GgufBuilder, tmp_path: Path, old: bytes, new: bytes) -> Path:
    content = builder.to_bytes()
    assert content.count(old) == 1
    path = tmp_path / "m.gguf"
    path.write_bytes(content.replace(old, new))
    return path


def test_nested_arrays_are_refused(builder: GgufBuilder, tmp_path: Path) -> None:
    old = struct.pack("<IIQ", ValueType.ARRAY, ValueType.I32, 3)
    new = struct.pack("<IIQ", ValueType.ARRAY, ValueType.ARRAY, 3)
    assert "nested arrays" in refusal(replaced(builder, tmp_path, old, new)).message


@pytest.mark.parametrize("kind", [ValueType.I32, ValueType.STRING])
@pytest.mark.parametrize("count", [2**64 - 1, 2**61, 2**32, 100_000])
def test_an_array_longer_than_the_file_is_refused(
    builder: GgufBuilder, tmp_path: Path, kind: ValueType, count: int
) -> None:
    old = struct.pack("<IIQ", ValueType.ARRAY, kind, 3)
    new = struct.pack("<IIQ", ValueType.ARRAY, kind, count)
    error = refusal(replaced(builder, tmp_path, old, new))
    assert "truncated" in error.message or "claims" in error.message


def test_a_string_longer_than_the_file_is_refused(builder: GgufBuilder, tmp_path: Path) -> None:
    old, new = struct.pack("<Q", 8) + b"qwen4exp", struct.pack("<Q", 2**24) + b"qwen4exp"
    assert "truncated" in refusal(replaced(builder, tmp_path, old, new)).message


def test_a_boolean_is_zero_or_one(builder: GgufBuilder, tmp_path: Path) -> None:
    path = replaced(builder, tmp_path, b"flag\x07\x00\x00\x00\x01", b"flag\x07\x00\x00\x00\x02")
    assert "a boolean is 0 or 1" in refusal(path).message


def test_keys_are_utf8(builder: GgufBuilder, tmp_path: Path) -> None:
    assert "UTF-8" in refusal(replaced(builder, tmp_path, b"small", b"sm\xffll")).message


def test_a_damaged_token_is_reported_when_it_is_read(builder: GgufBuilder, tmp_path: Path) -> None:
    metadata = open_gguf(replaced(builder, tmp_path, b"three", b"th\xffee")).metadata
    with pytest.raises(ModelError, match="item 2 of the value of metadata key 'words'"):
        metadata["words"]


def test_a_key_may_appear_only_once(builder: GgufBuilder, tmp_path: Path) -> None:
    assert (
        "'flags' appears twice" in refusal(replaced(builder, tmp_path, b"words", b"flags")).message
    )


def test_an_unknown_value_type_is_refused(builder: GgufBuilder, tmp_path: Path) -> None:
    path = replaced(builder, tmp_path, b"real\x0c\x00", b"real\x0d\x00")
    assert "unknown type 13" in refusal(path).message


def test_a_file_cut_short_says_how_much_is_missing(builder: GgufBuilder, tmp_path: Path) -> None:
    content = builder.to_bytes()
    end = len(content) - 22  # the padding behind the last tensor's ten bytes
    path = tmp_path / "m.gguf"
    path.write_bytes(content[:end])
    assert len(open_gguf(path).tensors) == 3
    path.write_bytes(content[: end - 1])
    message = refusal(path).message
    assert f"its tensors end at byte {end}, the file at {end - 1}" in message
    assert "'c' lies beyond" in message


# Shards


def write_shards(builder: GgufBuilder, folder: Path) -> list[Path]:
    """The builder's model as three shards, one tensor each."""
    paths = []
    for shard, tensor in enumerate(builder.tensors):
        part = GgufBuilder(values=dict(builder.values) if shard == 0 else {}, tensors=[tensor])
        part.add("split.no", ValueType.U16, shard)
        part.add("split.count", ValueType.U16, 3)
        part.add("split.tensors.count", ValueType.I32, 3)
        paths.append(part.write(folder / f"m-{shard + 1:05}-of-00003.gguf"))
    return paths


def test_shards_open_as_one_model(builder: GgufBuilder, tmp_path: Path) -> None:
    paths = write_shards(builder, tmp_path)
    file = open_gguf(paths[0])
    assert file.paths == tuple(paths)
    assert list(file.tensors) == ["a", "b", "c"]
    assert file.tensors["b"].path == paths[1]
    assert file.tensors["c"].data.tobytes() == b"0123456789"
    assert file.metadata["small"] == -5


def test_the_first_shard_may_hold_no_tensors() -> None:
    file = open_gguf(MODELS["mixB-quant"])
    assert len(file.paths) == 3
    assert len(file.tensors) == 164


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_any_shard_opens_the_whole_model(builder: GgufBuilder, tmp_path: Path, shard: int) -> None:
    paths = write_shards(builder, tmp_path)
    file = open_gguf(paths[shard])
    assert file.paths == tuple(paths)
    assert list(file.tensors) == ["a", "b", "c"]
    assert [info.path for info in file.tensors.values()] == paths
    assert file.metadata["small"] == -5  # only the first shard describes the model


@pytest.mark.parametrize("shard", [2, 3])
def test_a_later_shard_gives_the_model_of_the_first(shard: int) -> None:
    first = load_model_file(MODELS["mixB-quant"])
    later = load_model_file(ORACLE / f"mixB-quant-split-0000{shard}-of-00003.gguf")
    assert later.spec == first.spec
    assert list(later.tensors) == list(first.tensors)
    assert later.file.paths == first.file.paths


def test_shards_behind_links_are_found_by_the_names_of_the_links(
    builder: GgufBuilder, tmp_path: Path
) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for number, path in enumerate(write_shards(builder, tmp_path)):
        (links / path.name).symlink_to(path.rename(tmp_path / f"blob{number}"))
    assert len(open_gguf(links / "m-00003-of-00003.gguf").tensors) == 3


@pytest.mark.parametrize("opened", [0, 1, 2])
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_shard_is_named_whichever_is_opened(
    builder: GgufBuilder, tmp_path: Path, opened: int, missing: int
) -> None:
    paths = write_shards(builder, tmp_path)
    paths[missing].unlink()
    error = refusal_of(paths[opened])
    assert error.message == f"no such file: {paths[missing]}"
    if opened != missing:
        assert error.hint == "all 3 shards of the model must lie in one folder"


@pytest.mark.parametrize(("opened", "changed"), [(0, 1), (2, 1), (2, 0), (1, 0)])
def test_the_metadata_of_every_shard_is_checked(
    builder: GgufBuilder, tmp_path: Path, opened: int, changed: int
) -> None:
    paths = write_shards(builder, tmp_path)
    whole = paths[changed].read_bytes()
    for key in (b"split.count", b"split.no"):
        at = whole.index(key) + len(key)
        for wrong in (2, 7):
            value = struct.pack("<IH", ValueType.U16, wrong)
            paths[changed].write_bytes(whole[:at] + value + whole[at + len(value) :])
            error = refusal_of(paths[opened])
            assert str(paths[changed]) in error.message
            assert error.hint
    paths[changed].write_bytes(whole)
    assert len(open_gguf(paths[opened]).tensors) == 3


def test_a_damaged_shard_is_named(builder: GgufBuilder, tmp_path: Path) -> None:
    paths = write_shards(builder, tmp_path)
    paths[2].write_bytes(paths[2].read_bytes()[:-30])
    with pytest.raises(ModelError, match=r"m-00003-of-00003\.gguf: the file is truncated"):
        open_gguf(paths[0])


def test_a_first_shard_under_another_name_is_refused(builder: GgufBuilder, tmp_path: Path) -> None:
    first = write_shards(builder, tmp_path)[0]
    renamed = first.rename(tmp_path / "model.gguf")
    assert "its name does not lead to the others" in refusal(renamed).message


def test_shards_in_the_wrong_order_are_refused(builder: GgufBuilder, tmp_path: Path) -> None:
    paths = write_shards(builder, tmp_path)
    content = paths[1].read_bytes()
    paths[2].write_bytes(content)
    for path in paths[:2]:
        with pytest.raises(ModelError, match=r"m-00003-of-00003\.gguf does not continue the model"):
            open_gguf(path)
    with pytest.raises(
        ModelError, match=r"is named shard 3, but split\.no says it is shard 2 of 3"
    ):
        open_gguf(paths[2])


def test_a_tensor_in_two_shards_is_refused(builder: GgufBuilder, tmp_path: Path) -> None:
    builder.tensors[2].name = "a"
    paths = write_shards(builder, tmp_path)
    with pytest.raises(ModelError, match="tensor 'a' is in two shards"):
        open_gguf(paths[0])


def test_shards_must_hold_the_promised_number_of_tensors(
    builder: GgufBuilder, tmp_path: Path
) -> None:
    paths = write_shards(builder, tmp_path)
    for path in paths:
        old = b"split.tensors.count" + struct.pack("<Ii", ValueType.I32, 3)
        new = b"split.tensors.count" + struct.pack("<Ii", ValueType.I32, 4)
        path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(ModelError, match=r"hold 3 tensors, but split\.tensors\.count says 4"):
        open_gguf(paths[0])
