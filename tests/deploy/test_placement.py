from collections.abc import Mapping

import pytest

from cpd.common.errors import ConfigError
from cpd.common.settings import ClusterSettings
from deploy.placement import Placed, check_places, demand_of, gpu_share, grows, local_resources, next_move
from deploy.processes import processes
from tests.secret import secret_file

SPECS = processes(ClusterSettings(model="m", prefill=2, combined=1, routers=1, secret_file=secret_file()), "127.0.0.1")


def demands(resources: Mapping[str, float], gpus_per_worker: float = 0) -> list[dict[str, float]]:
    return [demand_of(spec, resources, gpus_per_worker) for spec in SPECS]


def test_a_local_ray_has_room_for_more_processes_than_it_starts_with() -> None:
    resources = local_resources()
    check_places(SPECS * 100, resources)
    assert demands(resources) == [{"cpd_combined": 1}, {"cpd_prefill": 1}, {"cpd_prefill": 1}, {"cpd_router": 1}]


def test_without_declared_roles_workers_take_a_cpu_each() -> None:
    assert demands({"CPU": 8}) == [{"CPU": 1}, {"CPU": 1}, {"CPU": 1}, {"CPU": 0.01}]


def test_only_workers_take_gpus() -> None:
    assert [demand.get("GPU") for demand in demands({"CPU": 8, "GPU": 3}, 1.0)] == [1, 1, 1, None]


def test_a_role_with_too_few_places_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 of the resource cpd_prefill, and 2 are needed"):
        check_places(SPECS, {"CPU": 8, "cpd_prefill": 1})
    check_places(SPECS, {"CPU": 8})


def test_in_a_ray_that_grows_processes_are_placed_by_role_and_gpus_are_whole() -> None:
    resources = {"CPU": 8, "cpd_grows": 1, "cpd_prefill": 1}
    assert grows(resources)
    assert not grows({"CPU": 8, "cpd_prefill": 1})
    check_places(SPECS, resources)
    assert demands(resources) == [{"cpd_combined": 1}, {"cpd_prefill": 1}, {"cpd_prefill": 1}, {"cpd_router": 1}]
    assert [gpu_share("cuda", 4, gpus, growing=True) for gpus in (0, 2)] == [1, 1]
    assert gpu_share("auto", 4, 0, growing=True) == 0


@pytest.mark.parametrize(
    ("device", "workers", "gpus", "share"),
    [
        ("cpu", 2, 8, 0),
        ("auto", 2, 0, 0),
        ("auto", 2, 2, 1),
        ("cuda", 2, 8, 1),
        ("auto", 2, 1, 0.5),
        ("cuda", 3, 2, 0.5),
    ],
)
def test_workers_share_gpus_only_when_there_are_too_few(device: str, workers: int, gpus: float, share: float) -> None:
    assert gpu_share(device, workers, gpus) == share


def test_a_missing_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        gpu_share("cuda", 1, 0)


def placed(**nodes: str) -> list[Placed]:
    """The processes in the order of SPECS; an exclamation mark says that one was displaced."""
    return [Placed(spec, node.strip("!"), node.endswith("!")) for spec, node in zip(SPECS, nodes.values(), strict=True)]


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        (("a", "a!", "b", "a"), None),  # equal
        (("a", "a!", "a!", "a!"), ("prefill-0", "b")),
        (("a", "a", "a", "a"), None),  # that is how they were started
        (("a", "a", "a!", "a"), ("prefill-1", "b")),
        (("a", "a", "b", "a!"), None),  # one router
        (("b!", "b!", "b!", "b"), ("combined-0", "a")),
    ],
)
def test_displaced_processes_go_where_fewer_are(nodes: tuple[str, ...], wanted: tuple[str, str] | None) -> None:
    move = next_move(placed(**dict(zip("wxyz", nodes, strict=True))), ["a", "b"], refused=())
    assert (move and (move[0].name, move[1])) == wanted


def test_a_machine_that_has_no_room_for_a_role_gets_none_of_it() -> None:
    here = placed(w="a!", x="a!", y="a!", z="a")
    move = next_move(here, ["a", "b"], refused={("combined", "b")})
    assert move is not None
    assert move[0].name == "prefill-0"
    assert next_move(here, ["a", "b"], refused={("combined", "b"), ("prefill", "b")}) is None
    assert next_move(here, [], refused=()) is None


def test_workers_on_a_shared_device_take_almost_no_cpu() -> None:
    taken = [demand_of(spec, {"CPU": 2}, 0, shared_device=True) for spec in SPECS]
    assert taken == [{"CPU": 0.01}] * 4
    assert demand_of(SPECS[0], {"CPU": 2, "cpd_combined": 1}, 0, shared_device=True) == {"cpd_combined": 1}
