"""Processes that cannot make a buffer together all hear why."""

import re

import pytest

import jax_ep
from jax_ep import _bootstrap


def test_disagreements_are_told_to_all_with_both_values(tmp_path, crews):
    results = crews(3, 1).run(tmp_path, "disagreements")
    for process, result in enumerate(results):
        for name, text in {
            "hidden": r"config.hidden is '16' in process 0 and '32' in process 2",
            "tokens": r"config.max_tokens_per_rank is '8' in process 0 and '9' in process 2",
            "version": r"the jax version is '[\d.]+' in process 0 and '0.0.1' in process 2",
            "user": r"process 0 is on host \S+ as user 0, process 2 on host \S+ as user 7",
        }.items():
            assert result[name]["type"] == "EpUsageError", name
            assert re.search(text, result[name]["text"]), result[name]
        told = "" if process == 2 else "process 2 failed: "
        assert result["experts"]["text"].startswith(f"{told}num_experts=13 does not divide")
        assert result["memory"]["text"].startswith(f"{told}no memory left for this test")
        assert result["ids"] == [results[2]["ahead"] + 1, results[2]["ahead"] + 2]


def test_bytes_of_all_sizes_arrive_and_who_does_not_come_is_named(tmp_path, crews):
    results = crews(3, 1).run(tmp_path, "exchanges")
    for result in results:
        assert result["sound"] == [True] * 4
    for result in results[:2]:
        assert result["missing"]["type"] == "EpError"
        assert (
            "process 2 of processes (0, 1, 2) did not come within 3 s"
            in (result["missing"]["text"])
        )
        assert result["missing"]["seconds"] < 20


def two_peers(answer, purpose="test"):
    """Process 0's view of an exchange in which process 1 sends what ``answer`` makes of it."""
    other = _bootstrap.Peers((0, 1), 1, lambda own: [b"", own])
    theirs = other._frame(purpose, b"theirs", failed=False)
    return _bootstrap.Peers((0, 1), 0, lambda own: answer(own, theirs))


def test_a_users_exchange_carries_the_bytes():
    assert two_peers(lambda own, theirs: [own, theirs]).gather("test", b"ours") == [
        b"ours",
        b"theirs",
    ]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda own, theirs: [own], "exchange gave 1 parts"),
        (lambda own, theirs: [own, "text"], "some that are not bytes"),
        (lambda own, theirs: [theirs, own], "other bytes than its own"),
        (lambda own, theirs: [own, b""], "process 1 sent 0 bytes that are not jax_ep's"),
        (lambda own, theirs: [own, theirs[:-1]], "process 1 are damaged.*6 were sent"),
        (lambda own, theirs: [own, theirs[:-1] + b"x"], "process 1 are damaged"),
        (lambda own, theirs: [own, own], "or of process 0"),
    ],
)
def test_what_a_users_exchange_does_wrong_is_said(answer, said):
    with pytest.raises(jax_ep.EpError, match=f"(?s){said}"):
        two_peers(answer).gather("test", b"ours")


def test_processes_at_different_places_are_told_apart():
    peers = two_peers(lambda own, theirs: [own, theirs], purpose="reset")
    with pytest.raises(jax_ep.EpError, match="process 1 is not at 'test' as process 0 is"):
        peers.gather("test", b"ours")
