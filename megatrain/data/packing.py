"""Which pieces share a row: best-fit decreasing, deterministic.

Rule: pure bookkeeping on lengths. Every piece is in exactly one row, whole.
Gives up: the order of samples across rows (the sampler shuffles rows anyway); inside a row it is the order read.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Rows of indices into `lengths` (n,), each row's lengths summing to at most `capacity`.

    Longest first, each into the fullest row that still has room; ties go to the row opened or filled last. Rows come in
    the order of their first index. O(n log n), plus a shift of at most `capacity` entries a piece.
    """
    assert len(lengths) == 0 or (lengths.min() > 0 and lengths.max() <= capacity)
    rows: list[list[int]] = []
    rows_by_room: dict[int, list[int]] = {}  # room left -> rows that have it
    rooms: list[int] = []  # the keys of rows_by_room, ascending
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        at = bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                del rows_by_room[room], rooms[at]
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        left = room - length
        if left and left not in rows_by_room:
            insort(rooms, left)
        if left:
            rows_by_room.setdefault(left, []).append(row)
    return sorted((sorted(row) for row in rows), key=lambda row: row[0])
