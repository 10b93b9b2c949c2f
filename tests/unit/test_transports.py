"""Which module serves the GPUs of several processes, and what those hear that none serves."""

import pytest

import jax_ep
from jax_ep import _transports
from jax_ep._transports import Process, Wishes

PLAIN = Wishes(only_puts=False, nvshmem=False)
FORCED = Wishes(only_puts=True, nvshmem=True)
DIRECT = Wishes(only_puts=False, nvshmem=True)
HERE = [Process(0, "alpha", "a", 1, True), Process(1, "alpha", "a", 1, True)]
APART = [Process(0, "alpha", "a", 1, True), Process(3, "beta", "b", 1, True)]


def module_for(processes, wishes=PLAIN):
    return _transports.module_for_gpus(processes, wishes)


def test_one_host_shares_memory_however_many_gpus_a_process_has():
    wide = [Process(0, "alpha", "a", 4, False), Process(1, "alpha", "a", 1, False)]
    assert module_for(HERE) == module_for(wide) == "cuda"


def test_several_hosts_take_nvshmem():
    assert module_for(APART) == module_for(APART, FORCED) == "nvshmem"


@pytest.mark.parametrize("wishes", [FORCED, DIRECT])
def test_one_host_takes_nvshmem_where_the_environment_asks_for_it(wishes):
    assert module_for(HERE, wishes) == "nvshmem"


def test_hosts_of_one_name_are_told_apart():
    twins = [Process(0, "node", "a", 1, True), Process(1, "node", "b", 1, True)]
    assert module_for(twins) == "nvshmem"


@pytest.mark.parametrize(
    ("processes", "wishes", "said"),
    [
        (
            [APART[0], Process(3, "beta", "b", 8, True)],
            PLAIN,
            "process 0 is on host 'alpha' and process 3 on host 'beta'.*process 3 has 8.*"
            "one process per GPU across nodes.*backend='reference'",
        ),
        ([HERE[0], Process(1, "alpha", "a", 2, True)], FORCED, "FORCE_REMOTE"),
        (
            [APART[0], Process(3, "beta", "b", 1, False)],
            PLAIN,
            "process 3 has no module.*nvidia-nvshmem-cu13.*JAX_EP_NVSHMEM=ON",
        ),
    ],
)
def test_what_nobody_serves_says_what_would_help(processes, wishes, said):
    with pytest.raises(jax_ep.EpUsageError, match=f"(?s){said}"):
        module_for(processes, wishes)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, PLAIN),
        ({"JAX_EP_FORCE_REMOTE": "0"}, PLAIN),
        ({"JAX_EP_FORCE_REMOTE": "1"}, FORCED),
        ({"JAX_EP_TRANSPORT": "nvshmem"}, DIRECT),
        ({"JAX_EP_TRANSPORT": "nvshmem", "JAX_EP_FORCE_REMOTE": "1"}, FORCED),
    ],
)
def test_wishes_of_the_environment(monkeypatch, variables, expected):
    for name in ("JAX_EP_FORCE_REMOTE", "JAX_EP_TRANSPORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Wishes.read() == expected


@pytest.mark.parametrize(
    ("name", "value"), [("JAX_EP_FORCE_REMOTE", "yes"), ("JAX_EP_TRANSPORT", "ucx")]
)
def test_a_wish_without_meaning_is_named(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(jax_ep.EpUsageError, match=f"{name}='{value}'"):
        Wishes.read()


@pytest.mark.parametrize(
    ("given_back", "expected"),
    [
        ([[], []], -1),
        ([[[0, 64]], [[0, 64]]], 0),
        ([[[0, 64]], []], -1),  # closed in one process only
        ([[[0, 64], [2, 64]], [[2, 64]]], 2),
        ([[[1, 64], [2, 64]], [[2, 64], [1, 64]]], 1),
        ([[[1, 128]], [[1, 128]]], -1),  # of another size
    ],
)
def test_a_window_is_used_again_once_all_have_given_it_back(given_back, expected):
    assert _transports.window_for_all(given_back, 64) == expected
