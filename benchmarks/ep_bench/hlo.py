"""Reads compiled HLO: how often a chain really does what it is timed for."""

import collections
import math
import re

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_COLLECTIVE = re.compile(rf"\s({'|'.join(COLLECTIVES)})(?:-start)?\(")
_TARGET = re.compile(r'custom_call_target="(jax_ep_\w+)"')
_COPY = re.compile(r"= \(?\w+\[([\d,]+)\][^=\n]*? copy(?:-start)?\(")
# A computation that XLA runs as one: the entry, and in it parts that it records as graphs.
_RUN = re.compile(r"^(?:ENTRY |%?command_buffer).*?^}", re.MULTILINE | re.DOTALL)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?^}", re.MULTILINE | re.DOTALL)
_LOOP = re.compile(r'body=%?([\w.\-]+)[^\n]*"known_trip_count":\{"n":"(\d+)"\}')
_REFERENCE = re.compile(r"(?:body|to_apply|calls)=%?([\w.\-]+)")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?)\s([\w\-]+)\(", re.MULTILINE)
_DIMENSIONS = re.compile(r"\w+\[([\d,]+)\]")
# They name what is there already; what is started is counted when it is done.
_MAKES_NOTHING = {
    "bitcast",
    "call",
    "copy",
    "copy-done",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "tuple",
}


def write_out_loops(text: str) -> str:
    """The text with what chains' loops run as often as they run it.

    A chain's loop makes a known number of turns and holds collectives or calls of ours. Its body
    becomes part of what is run.
    """
    found = {match[1]: match[0] for match in _COMPUTATION.finditer(text)}
    turns = {body: int(count) for body, count in _LOOP.findall(text)}

    def inside(name: str) -> set[str]:
        below = (inside(other) for other in _REFERENCE.findall(found.get(name, "")))
        return {name}.union(*below)

    for body, count in turns.items():
        names = inside(body)
        once = "\n".join(found[name] for name in names if name in found)
        if not count_calls(once):
            continue
        for name in names & found.keys():
            run = f"ENTRY {found[name]}" if name == body else found[name]
            text = text.replace(found[name], "\n".join([run] * count))
    return text


def count_calls(text: str) -> collections.Counter:
    """Collectives, by opcode, and custom calls of ours, by target."""
    return collections.Counter(_COLLECTIVE.findall(text) + _TARGET.findall(text))


def count_copies(text: str, at_least: int) -> int:
    """Copies of arrays of at least so many elements, in what is run."""
    found = (dims for part in _RUN.findall(text) for dims in _COPY.findall(part))
    return sum(_elements(dims) >= at_least for dims in found)


def count_arrays(text: str, elements: int) -> int:
    """Instructions, in what is run, that write an array of exactly so many elements."""
    return sum(
        any(_elements(dims) == elements for dims in _DIMENSIONS.findall(shape))
        for part in _RUN.findall(text)
        for shape, opcode in _INSTRUCTION.findall(part)
        if opcode not in _MAKES_NOTHING and not opcode.endswith("-start")
    )


def _elements(dims: str) -> int:
    return math.prod(map(int, dims.split(",")))


def added_copies(texts: dict[int, str], at_least: int) -> float:
    """Copies of at least so many elements that one operation added to a chain brings."""
    short, long = sorted(texts)
    grown = count_copies(texts[long], at_least) - count_copies(texts[short], at_least)
    return grown / (long - short)


def check_calls(name: str, texts: dict[int, str], calls: collections.Counter) -> None:
    """Checks that each operation added to a chain adds exactly ``calls``.

    Args:
        name: for the message.
        texts: optimised HLO of the short and the long chain, by length.
        calls: what one operation makes.

    Raises:
        AssertionError: operations were merged, dropped or added; a slope would time something else.
    """
    short, long = sorted(texts)
    grown = count_calls(texts[long])
    grown.subtract(count_calls(texts[short]))
    expected = {call: count * (long - short) for call, count in calls.items()}
    seen = {call: count for call, count in grown.items() if count}
    if seen != expected:
        raise AssertionError(
            f"{name}: from {short} to {long} operations the compiled program grew by {seen}, "
            f"not by {expected}"
        )


def count_row_collectives(text: str, at_least: int) -> int:
    """Collectives of any kind whose results have at least so many elements together."""
    found = ((shape, opcode.removesuffix("-start")) for shape, opcode in _INSTRUCTION.findall(text))
    return sum(
        opcode in COLLECTIVES
        and sum(_elements(dims) for dims in _DIMENSIONS.findall(shape)) >= at_least
        for shape, opcode in found
    )


def check_row_collectives(name: str, texts: dict[int, str], each: int, at_least: int) -> None:
    """Checks that each operation added to a chain adds collectives of at least so many elements.

    Raises:
        AssertionError: they are fewer than ``each``; operations were merged or dropped.
    """
    short, long = sorted(texts)
    counts = {length: count_row_collectives(text, at_least) for length, text in texts.items()}
    if counts[long] - counts[short] < each * (long - short):
        raise AssertionError(
            f"{name}: from {short} to {long} operations the collectives of {at_least} elements or "
            f"more grew from {counts[short]} to {counts[long]}, less than {each} for each"
        )


def check_arrays(name: str, texts: dict[int, str], elements: int) -> None:
    """Checks that each operation added to a chain writes one array more of so many elements.

    Raises:
        AssertionError: results that only the chain's last operation needs whole were cut down.
    """
    short, long = sorted(texts)
    grown = count_arrays(texts[long], elements) - count_arrays(texts[short], elements)
    if grown < long - short:
        raise AssertionError(
            f"{name}: from {short} to {long} operations the compiled program grew by {grown} "
            f"arrays of {elements} elements"
        )


def check_copies(name: str, texts: dict[int, str], at_least: int) -> None:
    """Checks that operations added to a chain add no copies of arrays of at least so many elements.

    Raises:
        AssertionError: they do; a slope would include the chain's own copies.
    """
    copies = added_copies(texts, at_least)
    if copies:
        short, long = sorted(texts)
        raise AssertionError(
            f"{name}: from {short} to {long} operations the compiled program grew by {copies:g} "
            f"copies of {at_least} elements or more for each"
        )
