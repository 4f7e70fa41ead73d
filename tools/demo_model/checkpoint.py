"""Reads and writes safetensors checkpoints with plain numpy.

Source: the safetensors format: u64 header length, JSON header, then the tensors' bytes.
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.float32]]


def widen(data: bytes | memoryview, dtype: str) -> NDArray[np.float32]:
    """Convert stored elements to float32, exactly.

    Raises:
        ValueError: a dtype other than F32, F16 or BF16.
    """
    if dtype == "BF16":
        bits = np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16
        return bits.view(np.float32)
    if dtype in ("F32", "F16"):
        return np.frombuffer(data, dtype="<f4" if dtype == "F32" else "<f2").astype(np.float32)
    raise ValueError(f"safetensors dtype {dtype} is not supported: use F32, F16 or BF16")


def narrow(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to bfloat16 bits, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
    return (rounded >> 16).astype(np.uint16)


def read_shard(path: Path) -> Arrays:
    """Read every tensor of one safetensors file as float32."""
    raw = memoryview(path.read_bytes())
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    header: dict[str, Any] = json.loads(bytes(raw[8 : 8 + header_bytes]))
    header.pop("__metadata__", None)
    body = raw[8 + header_bytes :]
    tensors: Arrays = {}
    for name, info in header.items():
        begin, end = info["data_offsets"]
        tensors[name] = widen(body[begin:end], info["dtype"]).reshape(info["shape"])
    return tensors


def read_checkpoint(folder: Path) -> Arrays:
    """Read all `*.safetensors` shards of a folder as float32, keyed by tensor name.

    Raises:
        FileNotFoundError: the folder has no shard.
    """
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"no *.safetensors in {folder}")
    tensors: Arrays = {}
    for shard in shards:
        tensors |= read_shard(shard)
    return tensors


def write_checkpoint(folder: Path, tensors: Arrays, shard_bytes: int = 16_000_000) -> list[Path]:
    """Write bfloat16 shards of at most `shard_bytes` each (a larger single tensor stands alone).

    Tensors go out in name order, so equal weights give equal bytes. Returns the files written.
    """
    groups: list[list[str]] = [[]]
    used = 0
    for name in sorted(tensors):
        size = tensors[name].size * 2
        if groups[-1] and used + size > shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    files = []
    for number, names in enumerate(groups, start=1):
        path = folder / f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        path.write_bytes(encode_shard({name: tensors[name] for name in names}))
        files.append(path)
    return files


def encode_shard(tensors: Arrays) -> bytes:
    """Encode tensors as one bfloat16 safetensors file."""
    header: dict[str, Any] = {}
    bodies = []
    offset = 0
    for name, values in tensors.items():
        data = narrow(values).astype("<u2").tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": list(values.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        bodies.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(bodies)
