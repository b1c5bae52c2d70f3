import io
from typing import Any

from rich.console import Console

from deploy.remote import cluster_table, devices, machines, reasons


def worker(name: str, **fields: Any) -> dict[str, Any]:
    pages = {"free": 12_000, "cached": 300, "used": 4, "reserved": 5, "quarantined": 6}
    load = {"running": 1, "waiting": 2, "waiting_tokens": 3456, "pages": pages}
    return {"id": name, "role": "combined", "state": "ready", "reason": None, "load": load, **fields}


def test_the_table_shows_each_worker_on_a_narrow_terminal() -> None:
    output = io.StringIO()
    workers = [
        worker("combined-0"),
        worker("prefill-0", role="prefill", load=None, state="refused", reason="another [model]"),
    ]
    Console(file=output, width=80).print(cluster_table({"workers": workers}))
    lines = output.getvalue().splitlines()
    assert lines[1].split() == ["combined-0", "ready", "1", "2", "3,456", "12,000", "300", "4", "11"]
    assert lines[2].split() == ["prefill-0", "refused"]
    assert reasons({"workers": workers}) == ["prefill-0: another [model]"]


def test_on_a_narrow_terminal_only_long_names_are_folded() -> None:
    output = io.StringIO()
    model = "Qwen3-30B-A3B-Instruct-2507"
    name = f"{model}-combined-0"
    workers = [
        worker(name, model=model, residency={"state": "draining"}),
        worker("b", role="prefill", residency={"state": "serving"}),
    ]
    Console(file=output, width=80).print(cluster_table({"workers": workers}))
    lines = output.getvalue().splitlines()
    folded = [line.split()[0] for line in lines[1:-1]]
    assert "".join(folded) == name
    assert lines[1].split()[1:] == ["ready,", "draining", "1", "2", "3,456", "12,000", "300", "4", "11"]
    assert lines[-1].split()[:4] == ["b", "(prefill)", "ready", "1"]
    assert all(len(line) <= 80 for line in lines)


def test_the_table_shows_what_was_drained_unless_it_runs_again() -> None:
    output = io.StringIO()
    answer = {"workers": [worker("combined-0")], "routers": [{"id": "router-0"}]}
    Console(file=output, width=80).print(cluster_table(answer, ["combined-0", "combined-1", "router-0"]))
    assert [line.split()[:2] for line in output.getvalue().splitlines()[1:]] == [
        ["combined-0", "ready"],
        ["combined-1", "drained"],
    ]


def test_machines_are_listed_if_there_are_several() -> None:
    workers, routers = (
        [worker("combined-0", host="one"), worker("combined-1", host="two")],
        [{"id": "router-0", "host": "one"}],
    )
    assert machines({"workers": workers, "routers": routers}) == ["one: combined-0, router-0", "two: combined-1"]
    assert machines({"workers": workers[:1], "routers": routers}) == []


def test_the_table_shows_a_role_that_the_name_does_not_tell() -> None:
    output = io.StringIO()
    workers = [worker("prefill-0"), worker("prefill-1", role="prefill")]
    Console(file=output, width=100).print(cluster_table({"workers": workers}))
    assert [line.split()[:2] for line in output.getvalue().splitlines()[1:]] == [
        ["prefill-0", "(combined)"],
        ["prefill-1", "ready"],
    ]


def test_the_names_of_several_models_workers_tell_their_role() -> None:
    output = io.StringIO()
    workers = [
        worker("combined-m-prefill-0", role="prefill", model="combined-m"),
        worker("prefill-m-prefill-0", model="prefill-m"),
    ]
    Console(file=output, width=100).print(cluster_table({"workers": workers}))
    assert [line.split()[:2] for line in output.getvalue().splitlines()[1:]] == [
        ["combined-m-prefill-0", "ready"],
        ["prefill-m-prefill-0", "(combined)"],
    ]


def test_different_devices_are_listed() -> None:
    fast, slow = {"device": "GPU, kernels of FlashInfer"}, {"device": "GPU, kernels of torch"}
    workers = [worker("combined-0", info=slow), worker("combined-1", info=None)]
    workers += [worker(f"combined-{number}", info=fast) for number in (2, 3, 4)]
    assert devices({"workers": workers}) == ["3 x GPU, kernels of FlashInfer", "1 x GPU, kernels of torch"]
