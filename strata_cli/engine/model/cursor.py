"""A bounds-checked reading position in the header of a mapped model file."""

from __future__ import annotations

import mmap
import struct

from strata_cli.errors import ModelError

DAMAGED_HINT = "the file is damaged or incomplete: download or convert it again"
U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")


class Cursor:
    """Reads little-endian values one after the other; never beyond the end of the file.

    Attributes:
        data: the whole mapped file.
        origin: the file's name, for messages.
        pos: offset of the next byte to read.
        size: bytes in the file.
    """

    __slots__ = ("data", "origin", "pos", "size")

    def __init__(self, data: mmap.mmap, origin: str) -> None:
        self.data = data
        self.origin = origin
        self.pos = 0
        self.size = len(data)

    def damaged(self, detail: str) -> ModelError:
        """The error for content that cannot be right; the caller raises it."""
        return ModelError(f"{self.origin}: {detail}", hint=DAMAGED_HINT)

    def truncated(self, what: str, nbytes: int, start: int) -> ModelError:
        """The error for a header that ends too early; the caller raises it."""
        return self.damaged(
            f"the header is truncated: {what} takes {nbytes} bytes from offset {start}, "
            f"but the file ends at {self.size}"
        )

    def skip(self, nbytes: int, what: str) -> int:
        """Step over nbytes and return where they start."""
        start = self.pos
        if nbytes > self.size - start:
            raise self.truncated(what, nbytes, start)
        self.pos = start + nbytes
        return start

    def u32(self, what: str) -> int:
        """The next four bytes."""
        return int(_U32.unpack_from(self.data, self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        """The next eight bytes."""
        return int(U64.unpack_from(self.data, self.skip(8, what))[0])

    def text(self, what: str, min_bytes: int, max_bytes: int) -> str:
        """A length (u64) and so many bytes of UTF-8."""
        length = self.u64(what)
        if not min_bytes <= length <= max_bytes:
            raise self.damaged(
                f"{what} is {length} bytes long; {min_bytes} to {max_bytes} are allowed"
            )
        start = self.skip(length, what)
        try:
            return self.data[start : self.pos].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is not valid UTF-8 ({error.reason})") from error

    def check_count(self, count: int, limit: int, min_bytes: int, what: str) -> None:
        """Refuse a count that the limit or the rest of the file rules out."""
        most = min(limit, (self.size - self.pos) // min_bytes)
        if count > most:
            raise self.damaged(
                f"the header claims {count} {what}, "
                f"but a file of {self.size} bytes can have at most {most}"
            )
