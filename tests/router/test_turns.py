import asyncio

from router.turns import MOST_TOKENS, TURN_TOKENS, Turns


async def test_others_pass_between_two_turns() -> None:
    seen: list[str] = []
    turns = Turns(seen.append)
    for output in ("first", "second", "third"):
        turns.wait(output, TURN_TOKENS)
    assert not seen
    for name in ("new request", "first token"):
        asyncio.get_running_loop().call_soon(seen.append, name)
        await asyncio.sleep(0)
    assert seen == ["first", "new request", "second", "first token"]
    await asyncio.sleep(0)
    assert seen[-1] == "third"


async def test_a_turn_takes_several_small_outputs() -> None:
    seen: list[int] = []
    turns = Turns(seen.append)
    for output in range(TURN_TOKENS + 2):
        turns.wait(output, 1)
    await asyncio.sleep(0)
    assert seen == list(range(TURN_TOKENS))
    await asyncio.sleep(0)
    assert seen == list(range(TURN_TOKENS + 2))


async def test_what_waits_is_bounded() -> None:
    seen: list[int] = []
    turns = Turns(seen.append)
    for output in range(3):
        turns.wait(output, MOST_TOKENS)
    assert seen == [0, 1]


async def test_all_can_be_handed_on_at_once_in_order() -> None:
    seen: list[int] = []
    turns = Turns(seen.append)
    for output in range(3):
        turns.wait(output, TURN_TOKENS)
    turns.finish()
    assert seen == [0, 1, 2]
    await asyncio.sleep(0)
    assert seen == [0, 1, 2]
