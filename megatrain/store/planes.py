"""The code of one piece of a lossless moment: fp32 numbers to few bytes, and back to every bit.

A piece is one of

    CONSTANT   every number has the same bits: nothing but a header
    RAW        the fp32 numbers
    BLOCKS     exponents as distances to the largest of their block, entropy-coded; sign and mantissa
    BYTES      exponents as they are (where distances are too wide); sign and mantissa

Where the bits of a moment go in a training run (`benchmarks/compression.py` measures it):

- Exponents (8 bits) carry about 3. Below the largest exponent of its block of 128 numbers, a number's own is one of a
  few. Two such distances of 4 bits make one byte for zlib's Huffman code: smaller than a code of whole exponents, and
  twice as fast. From a distance of 15 on it is an escape: 15, and the exponent in a list.
- The sign (1 bit) is as good as random in first moments, and always the same in second ones: left out there.
- The mantissa (23 bits) is noise in all but its first bits, and those save less than 0.1: no code can shorten it. It is
  stored as it is, unless a sample says otherwise: rows that no token has touched yet, first steps from bf16 gradients.

Rule: NumPy and zlib release the interpreter's lock, so pieces on several threads run at the same time. What `encode`
returns is in buffers of the calling thread, until its next call.
"""

from __future__ import annotations

import threading
import zlib
from typing import NamedTuple

import numpy as np

from megatrain.store.tier import round_up

PIECE = 1 << 18
"""Numbers that are coded together; 1 MiB as fp32."""
BLOCK = 128
"""Numbers whose exponents are coded below the largest of them."""

CONSTANT, RAW, BLOCKS, BYTES = range(4)
"""Codes of a piece."""
_AS_IS, _DEFLATED, _SEVEN_PLUS, _SEVEN_MINUS = range(4)
"""Codes of a section of a piece. The last two: seven bits a number, where all have the same sign."""

Bytes = np.ndarray
"""(n,) uint8."""

_ESCAPE = 15
_WHOLE = 2 * BLOCK  # distances are paired, so a piece is coded as an even number of blocks
_CHUNK = 1 << 16  # numbers worked on at a time: large enough for NumPy's calls, small enough for the cache
_WINDOW = 256  # bytes next to each other in a sample


class Header(NamedTuple):
    """What a piece is. Its sections, one after the other: middle and lowest mantissas; bases, distances, escapes."""

    code: int
    section_codes: tuple[int, ...] = (0,) * 5
    section_bytes: tuple[int, ...] = (0,) * 5
    constant: int = 0
    """The bits of each number of a CONSTANT piece."""

    @property
    def num_bytes(self) -> int:
        """Of the content."""
        return sum(self.section_bytes)


class Section(NamedTuple):
    code: int
    content: Bytes


class _Scratch(threading.local):
    """Buffers of one thread. Fresh ones would be mapped and unmapped for each piece, a third of the time."""

    def __init__(self) -> None:
        self.exponents, self.distances, self.lowest = (np.empty(PIECE, np.uint8) for _ in range(3))
        self.middle, self.is_escape = np.empty(PIECE, np.uint16), np.empty(PIECE, np.bool_)
        self.pairs, self.sevens = np.empty(PIECE // 2, np.uint8), np.empty(PIECE, np.uint8)
        self.chunks = np.empty((2, _CHUNK), np.uint32)


_scratch = _Scratch()


def encode(bits: np.ndarray) -> tuple[Header, list[Bytes]]:
    """The smallest piece for `bits`, (n,) uint32, 0 < n <= PIECE: what it is, and its sections."""
    if bits[0] == bits[-1] and (bits == bits[0]).all():
        return Header(CONSTANT, constant=int(bits[0])), []
    raw = Header(RAW, section_bytes=(bits.nbytes, 0, 0, 0, 0)), [bits.view(np.uint8)]
    if len(bits) % _WHOLE:
        bits = np.pad(bits, (0, -len(bits) % _WHOLE), mode="edge")
    exponents, middle, lowest = _split(bits)
    code, exponent_sections = BLOCKS, _encode_distances(exponents)
    if exponent_sections is None:
        nothing = Section(_AS_IS, exponents[:0])
        code, exponent_sections = BYTES, [nothing, _deflate_if_worth_it(exponents), nothing]
    sections = [_deflate_if_worth_it(middle), _encode_lowest(lowest), *exponent_sections]
    header = Header(code, tuple(s.code for s in sections), tuple(len(s.content) for s in sections))
    return (header, [s.content for s in sections]) if header.num_bytes < raw[0].num_bytes else raw


def decode(header: Header, memory: Bytes, out: np.ndarray) -> None:
    """Write the numbers of a piece, whose sections begin at `memory`, into `out`: (n,) uint32."""
    if header.code == CONSTANT:
        out[:] = header.constant
        return
    if header.code == RAW:
        out[:] = memory[: header.num_bytes].view(np.uint32)
        return
    stops = np.cumsum(header.section_bytes)[:-1]
    contents = np.split(memory[: header.num_bytes], stops)
    middle, lowest, bases, distances, escapes = map(Section, header.section_codes, contents)
    n = round_up(len(out), _WHOLE)
    if header.code == BLOCKS:
        exponents = _decode_distances(bases.content, _inflate(distances, n // 2), _inflate(escapes, None))
    else:
        exponents = _inflate(distances, n)
    _join(exponents, _inflate(middle, 2 * n), _decode_lowest(lowest, n), out)


def _split(bits: np.ndarray) -> tuple[Bytes, Bytes, Bytes]:
    """(n,) uint32 -> exponents (n,), upper 16 bits of the mantissa (2n,), its lowest 7 and the sign (n,), all uint8."""
    n = len(bits)
    exponents, middle, lowest = _scratch.exponents[:n], _scratch.middle[:n], _scratch.lowest[:n]
    for start in range(0, n, _CHUNK):
        chunk = slice(start, min(start + _CHUNK, n))
        rotated, sign = _scratch.chunks[:, : chunk.stop - start]
        # Turned left by one bit, the parts begin where bytes do.
        np.left_shift(bits[chunk], 1, out=rotated)
        np.right_shift(bits[chunk], 31, out=sign)
        rotated |= sign
        np.copyto(lowest[chunk], rotated, casting="unsafe")
        rotated >>= 8
        np.copyto(middle[chunk], rotated, casting="unsafe")
        rotated >>= 16
        np.copyto(exponents[chunk], rotated, casting="unsafe")
    return exponents, middle.view(np.uint8), lowest


def _join(exponents: Bytes, middle: Bytes, lowest: Bytes, out: np.ndarray) -> None:
    """The inverse of `_split`. out: (n,) uint32, of which the parts may have more."""
    middle = middle.view(np.uint16)
    for start in range(0, len(out), _CHUNK):
        chunk = slice(start, min(start + _CHUNK, len(out)))
        rotated, part = _scratch.chunks[:, : chunk.stop - start]
        np.copyto(rotated, exponents[chunk])
        rotated <<= 16
        np.copyto(part, middle[chunk])
        rotated |= part
        rotated <<= 8
        np.copyto(part, lowest[chunk])
        rotated |= part
        np.right_shift(rotated, 1, out=part)
        rotated <<= 31
        np.bitwise_or(rotated, part, out=out[chunk])


# Sections


def _encode_distances(exponents: Bytes) -> list[Section] | None:
    """The largest exponent of each block, distances to it, and the exponents which are further away than 14.

    None where those are so many that distances are no help. exponents: (n,), n a multiple of _WHOLE.
    """
    n, half = len(exponents), len(exponents) // 2
    distances, is_escape, pairs = _scratch.distances[:n], _scratch.is_escape[:n], _scratch.pairs[:half]
    blocks = exponents.reshape(-1, BLOCK)
    bases = blocks.max(axis=1)
    np.subtract(bases[:, None], blocks, out=distances.reshape(-1, BLOCK))
    np.greater_equal(distances, _ESCAPE, out=is_escape)
    escapes = exponents[np.flatnonzero(is_escape)] if is_escape.any() else exponents[:0]
    if len(escapes) > n // 16:
        return None
    np.minimum(distances, _ESCAPE, out=distances)
    np.left_shift(distances[half:], 4, out=pairs)
    pairs |= distances[:half]
    return [Section(_AS_IS, bases), _deflate_if_worth_it(pairs), _deflate_if_worth_it(escapes)]


def _decode_distances(bases: Bytes, pairs: Bytes, escapes: Bytes) -> Bytes:
    n, half = 2 * len(pairs), len(pairs)
    exponents, distances = _scratch.exponents[:n], _scratch.distances[:n]
    np.bitwise_and(pairs, _ESCAPE, out=distances[:half])
    np.right_shift(pairs, 4, out=distances[half:])
    np.subtract(bases[:, None], distances.reshape(-1, BLOCK), out=exponents.reshape(-1, BLOCK))
    if len(escapes):
        exponents[np.flatnonzero(distances == _ESCAPE)] = escapes
    return exponents


def _encode_lowest(lowest: Bytes) -> Section:
    """lowest: (n,), n a multiple of 8, with the sign in the lowest bit."""
    is_plus, is_minus = not np.bitwise_or.reduce(lowest) & 1, bool(np.bitwise_and.reduce(lowest) & 1)
    if not (is_plus or is_minus):
        return _deflate_if_worth_it(lowest)
    deflated = _deflate_if_worth_it(lowest, len(lowest) * 7 // 8)
    if deflated.code == _DEFLATED:
        return deflated
    # Eight runs of 7 bits in seven runs of bytes: the last one gives a bit to each of the others.
    runs, packed = lowest.reshape(8, -1), _scratch.sevens[: len(lowest) // 8 * 7].reshape(7, -1)
    for i in range(7):
        np.bitwise_or(runs[i] & 0xFE, runs[7] >> (i + 1) & 1, out=packed[i])
    return Section(_SEVEN_PLUS if is_plus else _SEVEN_MINUS, packed.reshape(-1))


def _decode_lowest(section: Section, n: int) -> Bytes:
    if section.code not in (_SEVEN_PLUS, _SEVEN_MINUS):
        return _inflate(section, n)
    packed, lowest = section.content.reshape(7, n // 8), _scratch.lowest[:n].reshape(8, -1)
    sign = section.code == _SEVEN_MINUS
    np.bitwise_and(packed, 0xFE, out=lowest[:7])
    lowest[:7] |= sign
    lowest[7] = sign
    for i in range(7):
        lowest[7] |= (packed[i] & 1) << (i + 1)
    return lowest.reshape(-1)


def _deflate_if_worth_it(content: Bytes, as_is_bytes: int | None = None) -> Section:
    """Deflated where that saves an eighth of `as_is_bytes` or more: less is not worth the time.

    as_is_bytes: what the section takes otherwise; None for as many as it has.
    """
    most_bytes = (len(content) if as_is_bytes is None else as_is_bytes) * 7 // 8
    # Short windows from all over: entropy from their bytes, runs (of zeros, mostly) from their neighbours.
    windows = content[: len(content) // _WINDOW * _WINDOW].reshape(-1, _WINDOW)
    windows = windows[:: len(windows) // 16 | 1]  # odd, as rows repeat by powers of two
    if len(windows) == 0:
        return Section(_AS_IS, content)
    has_runs = np.count_nonzero(windows[:, 1:] == windows[:, :-1]) > windows.size // 4
    shares = np.bincount(windows.reshape(-1), minlength=256) / windows.size
    entropy_bits = -float(shares @ np.log2(shares, out=np.zeros(256), where=shares > 0))
    if not has_runs and entropy_bits / 8 * len(content) > most_bytes:
        return Section(_AS_IS, content)
    strategy = zlib.Z_RLE if has_runs else zlib.Z_HUFFMAN_ONLY
    compressor = zlib.compressobj(level=1, wbits=-15, memLevel=9, strategy=strategy)
    deflated = compressor.compress(content) + compressor.flush()
    if len(deflated) > most_bytes:
        return Section(_AS_IS, content)
    return Section(_DEFLATED, np.frombuffer(deflated, dtype=np.uint8))


def _inflate(section: Section, num_bytes: int | None) -> Bytes:
    """num_bytes: how many the section must have; None where it may have any number."""
    content = section.content
    if section.code == _DEFLATED:
        content = np.frombuffer(zlib.decompress(content, -15, num_bytes or PIECE), dtype=np.uint8)
    assert num_bytes in (None, len(content)), f"a section of {len(content)} bytes in place of {num_bytes}"
    return content
