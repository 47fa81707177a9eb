"""The natural text of the demo checkpoints: Jane Austen's six novels, as Debian ships them.

They are public domain; Debian's package `r-cran-janeaustenr` (MIT) holds them as one vector of
lines a novel in R's lazy-load format: `apt-get download r-cran-janeaustenr`, `dpkg -x` it, and read
`usr/lib/R/site-library/janeaustenr/data/Rdata.rdb`. No R is needed.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

STRINGS = 16  # R's type code of a character vector
MISSING = 0xFFFFFFFF  # the length R writes for NA

HELD_OUT = 2
"""Northanger Abbey: the haystack of the evaluations, never trained on."""


class TextError(ValueError):
    """The file is not what Debian's package holds."""


def read_novels(path: str | Path) -> list[str]:
    """The novels in the file's order: EMMA, MANSFIELD PARK, NORTHANGER ABBEY, Persuasion, PRIDE AND
    PREJUDICE, SENSE AND SENSIBILITY. Paragraphs are one line each, blank lines dropped.

    Raises TextError when the file is not a sequence of zlib-compressed R character vectors.
    """
    return ["\n".join(_paragraphs(_strings(block))) for block in _blocks(Path(path).read_bytes())]


def _blocks(data: bytes) -> Iterator[bytes]:
    """The uncompressed entries: each is its length (of the data, big-endian) and a zlib stream."""
    while data:
        stream = zlib.decompressobj()
        try:
            block = stream.decompress(data[4:])
        except zlib.error as error:
            raise TextError(f"not an R lazy-load file: {error}") from error
        if not stream.eof or struct.unpack(">I", data[:4])[0] != len(block):
            raise TextError("an entry of the R lazy-load file is cut short")
        yield block
        data = stream.unused_data


def _strings(block: bytes) -> Iterator[str]:
    """The elements of a serialised (XDR, version 3) R character vector."""
    version, _, _, name = struct.unpack_from(">4I", block, 2)
    at = 18 + name
    flags, count = struct.unpack_from(">2I", block, at)
    if block[:2] != b"X\n" or version != 3 or flags & 0xFF != STRINGS:
        raise TextError("an entry of the R lazy-load file is no character vector")
    at += 8
    for _ in range(count):
        length = struct.unpack_from(">I", block, at + 4)[0]
        at += 8
        if length == MISSING:
            continue
        yield block[at : at + length].decode()
        at += length


def _paragraphs(lines: Iterator[str]) -> Iterator[str]:
    paragraph: list[str] = []
    for line in lines:
        if line.strip():
            paragraph.append(line.strip())
        elif paragraph:
            yield " ".join(paragraph)
            paragraph = []
    if paragraph:
        yield " ".join(paragraph)
