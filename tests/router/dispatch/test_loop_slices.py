import asyncio

from router.dispatch.loop_slices import MAX_WAITING_TOKENS, SLICE_TOKENS, LoopSlices


async def test_other_tasks_run_between_two_slices() -> None:
    seen: list[str] = []
    slices = LoopSlices(seen.append)
    for output in ("first", "second", "third"):
        slices.add(output, SLICE_TOKENS)
    assert not seen
    for name in ("new request", "first token"):
        asyncio.get_running_loop().call_soon(seen.append, name)
        await asyncio.sleep(0)
    assert seen == ["first", "new request", "second", "first token"]
    await asyncio.sleep(0)
    assert seen[-1] == "third"


async def test_a_slice_takes_several_small_outputs() -> None:
    seen: list[int] = []
    slices = LoopSlices(seen.append)
    for output in range(SLICE_TOKENS + 2):
        slices.add(output, 1)
    await asyncio.sleep(0)
    assert seen == list(range(SLICE_TOKENS))
    await asyncio.sleep(0)
    assert seen == list(range(SLICE_TOKENS + 2))


async def test_the_queue_has_a_limit() -> None:
    seen: list[int] = []
    slices = LoopSlices(seen.append)
    for output in range(3):
        slices.add(output, MAX_WAITING_TOKENS)
    assert seen == [0, 1]


async def test_flush_handles_all_in_order() -> None:
    seen: list[int] = []
    slices = LoopSlices(seen.append)
    for output in range(3):
        slices.add(output, SLICE_TOKENS)
    slices.flush()
    assert seen == [0, 1, 2]
    await asyncio.sleep(0)
    assert seen == [0, 1, 2]
