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
_COPY = re.compile(r"= \w+\[([\d,]+)\]\S* copy\(")


def count_calls(text: str) -> collections.Counter:
    """Collectives, by opcode, and custom calls of ours, by target."""
    return collections.Counter(_COLLECTIVE.findall(text) + _TARGET.findall(text))


def count_copies(text: str, at_least: int) -> int:
    """Copies of arrays of at least so many elements in the entry computation."""
    entry = text[text.index("\nENTRY ") :]
    shapes = (tuple(map(int, dims.split(","))) for dims in _COPY.findall(entry))
    return sum(math.prod(shape) >= at_least for shape in shapes)


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


def check_copies(name: str, texts: dict[int, str], at_least: int) -> None:
    """Checks that operations added to a chain add no copies of arrays of at least so many elements.

    Raises:
        AssertionError: they do; a slope would include the chain's own copies.
    """
    short, long = sorted(texts)
    copies = count_copies(texts[long], at_least) - count_copies(texts[short], at_least)
    if copies:
        raise AssertionError(
            f"{name}: from {short} to {long} operations the compiled program grew by {copies} "
            f"copies of {at_least} elements or more"
        )
