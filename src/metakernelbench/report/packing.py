"""Keeps a report small: what is not seen at first is packed, and unpacked by the page when it is opened.

A study of 1,776 attempts has hundreds of megabytes of text, so a report shows as much of it as fits: `DETAILS` are
tried in turn, on a sample of the study first.
"""

from __future__ import annotations

import base64
import bz2
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from markupsafe import Markup

from metakernelbench.report.trajectory import Room


@dataclass(frozen=True, kw_only=True)
class Detail:
    """What a report shows of every attempt, beside its kernel, its skill and its verdicts."""

    turn: Room | None
    """Of each turn of the trajectory; None leaves trajectories out."""
    submissions: bool = True
    """The kernels that were sent as submissions."""
    left_out: str | None = None
    """What the reader has to be told, as a sentence."""


def _smaller(what: str) -> str:
    return f"To keep this report small, {what}; the store has all of it, and `mkb view` shows it."


DETAILS = (
    Detail(turn=Room(said=4000, typed=6000, seen=4000)),
    Detail(turn=Room(said=1200, typed=1200, seen=1200), left_out=_smaller("long turns are cut")),
    Detail(turn=Room(said=500, typed=400, seen=400), left_out=_smaller("turns are cut to a few lines")),
    Detail(turn=Room(said=200, typed=120, seen=0), left_out=_smaller("only the gist of every turn is in it")),
    Detail(
        turn=Room(said=300, typed=200, seen=120),
        submissions=False,
        left_out=_smaller("turns are cut to a few lines and no submitted kernel is in it"),
    ),
    Detail(
        turn=Room(said=200, typed=120, seen=0),
        submissions=False,
        left_out=_smaller("only the gist of every turn and no submitted kernel is in it"),
    ),
    Detail(
        turn=Room(said=0, typed=0, seen=0, headline=80),
        submissions=False,
        left_out=_smaller("only the first line of every turn and no submitted kernel is in it"),
    ),
    Detail(turn=None, submissions=False, left_out=_smaller("no trajectory and no submitted kernel is in it")),
)
"""From the richest to the barest."""

_SAMPLE = 12
"""Parts that predict the size of all of them, to within some percent."""


def packed(html: str) -> str:
    """bzip2 in Base85: 5 characters for 4 bytes, of the alphabet of RFC 1924 with `.` for `<`.

    Attempts at one thing have much in common, over distances beyond the 32 kB that deflate looks back: bzip2 takes a
    third less. `templates/unpack.js` undoes both.
    """
    return base64.b85encode(bz2.compress(html.encode())).decode().replace("<", ".")


def as_json(parts: Mapping[str, str]) -> Markup:
    """All packed parts: names and values are ASCII, without quotes, backslashes and `<`, so
    that they mean nothing in JSON and HTML."""
    return Markup(json.dumps(parts, separators=(",", ":")))


def packed_all(names: Iterable[str], render: Callable[[str], str]) -> dict[str, str]:
    """Name → the packed HTML of the part. Packing leaves the interpreter to others, so it goes on beside rendering."""
    names = list(names)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(names, pool.map(packed, map(render, names)), strict=True))


def richest(names: Sequence[str], render: Callable[[str, Detail], str], room: int) -> tuple[Detail, dict[str, str]]:
    """The richest detail at which the parts `names` take no more than `room` bytes, and all of them packed at it; the
    barest where none does. A sample says which details are worth trying on all."""
    sample = names[:: max(1, len(names) // _SAMPLE)]
    for detail in DETAILS[:-1]:

        def at_this(name: str, detail: Detail = detail) -> str:
            return render(name, detail)

        size = sum(map(len, packed_all(sample, at_this).values()))
        if size * len(names) / max(1, len(sample)) <= room:
            parts = packed_all(names, at_this)
            if sum(map(len, parts.values())) <= room:
                return detail, parts
    return DETAILS[-1], packed_all(names, lambda name: render(name, DETAILS[-1]))
