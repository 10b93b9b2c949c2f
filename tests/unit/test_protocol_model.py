"""Every interleaving of small runs of the protocol, and of protocols that are wrong by one rule."""

import itertools
import zlib

import pytest
from protocol_model import DROPPED, SENT, SKIPPED, Rules, Scenario, explore


def all_sent(operation, source, peer, token):
    return SENT


def mixed(operation, source, peer, token):
    """About half the payloads sent, the rest split between the two ways of sending none."""
    hashed = zlib.crc32(bytes((operation, source, peer, token)))
    return (SENT, SKIPPED, SENT, DROPPED)[hashed % 4]


def scenario(num_ranks, slots, *operations, fate=all_sent):
    return Scenario(num_ranks, slots, operations, fate)


# Several operations in a row, with several chunks, with none of the tokens, with fewer than before.
HEALTHY = {
    "two_ranks_dispatch": scenario(2, 1, ("dispatch", 3), ("dispatch", 0), ("dispatch", 2)),
    "two_ranks_dispatch_mixed": scenario(2, 2, ("dispatch", 5), ("dispatch", 3), fate=mixed),
    "two_ranks_grad": scenario(2, 2, ("dispatch", 3), ("combine_grad", 3), ("dispatch", 1)),
    "two_ranks_combine": scenario(2, 2, ("combine", 3), ("combine", 0), ("combine", 4)),
    "two_ranks_combine_mixed": scenario(2, 2, ("combine", 6), ("combine", 2), fate=mixed),
    "three_ranks_dispatch": scenario(3, 1, ("dispatch", 2), ("dispatch", 1)),
    "three_ranks_grad": scenario(3, 1, ("combine_grad", 2), ("combine_grad", 1), fate=mixed),
    "three_ranks_combine": scenario(3, 1, ("combine", 2), ("combine", 1)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_every_interleaving_keeps_the_invariants(name):
    explored = explore(Rules(), HEALTHY[name])
    print(f"{name}: {explored.num_states} states")
    assert explored.violation is None, "\n".join((str(explored.violation), *explored.trace))
    assert explored.num_finals == 1, "all runs end, and with the same memory"
    assert explored.num_states > 500, "too small a search to say anything"


def test_every_pattern_of_sent_skipped_and_dropped():
    """All 729 ways in which two ranks' three tokens can fare, over epochs 1 to 3."""
    places = list(itertools.product(range(2), range(3)))  # source, token
    for fates in itertools.product((SENT, SKIPPED, DROPPED), repeat=len(places)):
        of = dict(zip(places, fates, strict=True))
        run = scenario(
            2, 1, ("combine", 3), fate=lambda _, source, peer, token, of=of: of[source, token]
        )
        explored = explore(Rules(), run)
        assert explored.violation is None, (of, str(explored.violation))
        assert explored.num_finals == 1


LONG = scenario(2, 1, ("dispatch", 4), ("combine_grad", 2))
TURNS = scenario(2, 1, ("combine", 5))

# Each rule changed alone, a run in which it matters, and the invariant that must be seen to break.
MUTANTS = {
    "no_credit": (Rules(credit_lag=None), LONG, 1),
    "credit_off_by_one": (Rules(credit_lag=3), LONG, 1),
    "credit_too_strict": (Rules(credit_lag=1), LONG, 2),
    "credit_before_reading": (Rules(credit_after_reading=False), LONG, 1),
    "no_credit_for_last_epoch": (Rules(credit_every_epoch=False), LONG, 2),
    "one_buffer": (Rules(num_buffers=1), LONG, 1),
    "flag_before_payload": (Rules(flag_after_payload=False), LONG, 3),
    "flag_without_epoch": (Rules(flag_has_epoch=False), LONG, 3),
    "no_flag_for_unneeded_tokens": (
        Rules(flags_for_all=False),
        scenario(2, 2, ("dispatch", 3), fate=mixed),
        2,
    ),
    "counts_not_awaited": (Rules(counts_awaited=False), LONG, 3),
    "combine_no_credit": (Rules(credit_lag=None), TURNS, 1),
    "combine_credit_off_by_one": (Rules(credit_lag=3), TURNS, 1),
    "combine_flag_before_payload": (Rules(flag_after_payload=False), TURNS, 3),
    "combine_flag_without_epoch": (Rules(flag_has_epoch=False), TURNS, 3),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_protocols_are_caught(name):
    rules, run, invariant = MUTANTS[name]
    assert explore(Rules(), run).violation is None, "the run itself must be a healthy one"
    explored = explore(rules, run)
    assert explored.violation is not None, f"{explored.num_states} states and nothing noticed"
    assert explored.violation.invariant == invariant, (str(explored.violation), explored.trace)
    assert explored.trace, "a violation comes with the way to it"
