"""The places that Horovod wants to be told under launchers it does not know."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvdtrain.backends.horovod_launch import _cross_places, connects_over_mpi


def test_cross_places_on_uneven_nodes_given_in_any_order() -> None:
    # node 1: ranks 0, 3 and 4; node 0: ranks 1 and 2
    places = [{"node_rank": node, "local_rank": local} for node, local in [(1, 0), (0, 0), (0, 1), (1, 1), (1, 2)]]
    assert _cross_places(places) == [(1, 2), (0, 2), (0, 2), (1, 2), (0, 1)]


@pytest.mark.parametrize(
    ("launcher", "built", "transport", "gloo_server", "expected"),
    [
        ("mpirun", True, "auto", False, True),
        ("mpirun", True, "mpi", False, True),
        ("mpirun", True, "gloo", False, False),
        ("mpirun", False, "auto", False, False),
        ("horovodrun", True, "auto", False, True),
        ("horovodrun", True, "auto", True, False),
        ("torchrun", True, "auto", False, False),
        ("manual", True, "auto", False, False),
        ("srun", True, "auto", False, False),
    ],
)
def test_who_connects_over_mpi(
    monkeypatch: pytest.MonkeyPatch, launcher: str, built: bool, transport: str, gloo_server: bool, expected: bool
) -> None:
    monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", raising=False)
    if gloo_server:
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    assert connects_over_mpi(launcher, SimpleNamespace(mpi_built=lambda: built), transport) is expected
