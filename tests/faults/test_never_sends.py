"""A rank that sends nothing: all others say who, in what operation and epoch, by the deadline."""

import pytest
from fault_programs import (
    AT_ONCE_S,
    GRACE_S,
    OPERATIONS,
    TIMEOUT_S,
    failure,
    make_setup,
    open_setup,
)

import jax_ep


@pytest.fixture(
    scope="module",
    params=[(2, "native"), (4, "native"), (8, "native"), (4, "window")],
    ids=lambda param: f"{param[0]}ranks_{param[1]}",
)
def setup(request):
    with open_setup(*request.param) as setup:
        yield setup


@pytest.fixture(autouse=True)
def healthy_again(setup):
    """One failed test must not make the others fail."""
    yield
    setup.buffer.reset()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_silent_rank_is_named_by_all_others(setup, operation, rng):
    silent = int(rng.integers(setup.case.R))
    epoch = setup.next_epoch(operation)
    setup.set_fault("skip_send", silent)
    text, seconds = failure(setup.run[operation])
    assert TIMEOUT_S * 0.9 < seconds < TIMEOUT_S + GRACE_S
    assert "EpTimeoutError" in text
    for part in (operation, f"epoch {epoch}", f"rank {silent}", "reset()"):
        assert part in text

    records = setup.records(setup.case.R - 1)
    assert sorted(record["rank"] for record in records) == [
        rank for rank in range(setup.case.R) if rank != silent
    ]
    for record in records:
        assert (record["kind"], record["op"]) == ("timeout", operation), record
        assert (record["peer"], record["epoch"], record["group"]) == (silent, epoch, 0), record
        assert record["expected"] == epoch > record["seen"], record
        assert f"rank {record['rank']}" in record["message"]
    with pytest.raises(jax_ep.EpTimeoutError, match=f"(?s){operation}.*reset") as raised:
        setup.buffer.check()
    assert raised.value.peer == silent
    assert raised.value.rank != silent
    assert (raised.value.op, raised.value.epoch) == (operation, epoch)
    assert len(raised.value.records) == setup.case.R - 1

    for later in OPERATIONS:
        text, seconds = failure(setup.run[later])
        assert "EpTimeoutError" in text
        assert seconds < AT_ONCE_S, f"{later} waited {seconds} s on a window known to be broken"
    with pytest.raises(jax_ep.EpTimeoutError):
        setup.buffer.check()

    setup.buffer.reset()
    setup.assert_healthy()


def test_one_rank_waits_for_nobody(rng):
    """R = 1: there is no peer to miss."""
    setup = make_setup(1, rng)
    setup.set_fault("late", 0, 0.05)
    setup.assert_healthy()
    setup.buffer.close()
