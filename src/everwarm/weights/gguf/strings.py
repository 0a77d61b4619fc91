"""Arrays of strings, as GGUF lays them out: length in 8 bytes, then the bytes, one string after the other.

In: the bytes and the number of strings. Out: where they start, or the strings. A vocabulary is a linked list of a
quarter of a million links; following them one by one in Python takes tens of milliseconds. Instead, a window is
searched for lengths below 256 (any byte, then seven zeros): while each find points at the next, the finds are the
links. Where they do not (an empty or a long string, a zero inside a string), some links are followed one by one.
Nothing is guessed: a start is accepted only because the string before it ends there.
"""

import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from everwarm.weights.gguf.mapped import Bytes

LENGTH_BYTES = 8

_LENGTH = struct.Struct("<Q")
_WINDOW_BYTES = 128 << 10
_FEW, _MANY = 1_024, 16_384  # links to follow one by one after a window that shows fewer: twice as many each time


def string_starts(data: Bytes, count: int) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Starts of strings, in runs, each with the end of its last one. Fewer than `count` if the data ends too early."""
    position, patience = 0, _FEW
    while count:
        starts, end = _search(data, position, count)
        if len(starts) >= min(count, patience):
            patience = _FEW
        else:
            starts, end = _follow(data, position, min(count, patience))
            patience = min(2 * patience, _MANY)
        if not len(starts):
            return
        yield starts, end
        position = end
        count -= len(starts)


def decode_strings(data: Bytes, count: int) -> list[str]:
    """All strings; a byte that is not UTF-8 becomes a lone surrogate. Fewer than `count` if the data ends too early."""
    runs = [run for run, _ in string_starts(data, count)]
    if not runs:
        return []
    starts = np.concatenate(runs)
    ends = np.append(starts[1:], len(data))
    longest = int((ends - starts).max()) - LENGTH_BYTES
    joined = data.copy()
    for byte in range((longest.bit_length() + 7) // 8):
        joined[starts + byte] = 0
    text = joined != 0
    if np.count_nonzero(text) == len(data) - LENGTH_BYTES * count:
        # No string holds a zero, so one zero in front of each can separate them: decode once, split once.
        text[starts] = True
        return str(joined[text].data, "utf-8", "surrogateescape").split("\0")[1:]
    view = data.data
    bounds = zip((starts + LENGTH_BYTES).tolist(), ends.tolist(), strict=True)
    return [str(view[start:end], "utf-8", "surrogateescape") for start, end in bounds]


def _search(data: Bytes, position: int, count: int) -> tuple[NDArray[np.int64], int]:
    """Up to `count` starts from `position` on: those that one window shows beyond doubt, or none."""
    window = data[position : position + min(_WINDOW_BYTES, 64 * count)]
    zero = window[1:] == 0
    zero = zero[:-1] & zero[1:]  # two zeros from here
    zero = zero[:-2] & zero[2:]  # four
    zero = zero[:-3] & zero[3:]  # seven
    found = np.flatnonzero(zero)
    if not len(found) or found[0] != 0:
        return found[:0], position
    after = found + window[found] + LENGTH_BYTES
    broken = np.flatnonzero(after[:-1] != found[1:])
    linked = min(count, int(broken[0]) + 1 if len(broken) else len(found))
    if position + int(after[linked - 1]) > len(data):
        linked -= 1
    end = int(after[linked - 1]) if linked else 0
    return found[:linked] + position, position + end


def _follow(data: Bytes, position: int, count: int) -> tuple[NDArray[np.int64], int]:
    """Up to `count` starts from `position` on, one by one; fewer if the data ends inside a string."""
    view, size, starts = data.data, len(data), []
    for _ in range(count):
        if position + LENGTH_BYTES > size:
            break
        after = position + LENGTH_BYTES + _LENGTH.unpack_from(view, position)[0]
        if after > size:
            break
        starts.append(position)
        position = after
    return np.array(starts, np.int64), position
