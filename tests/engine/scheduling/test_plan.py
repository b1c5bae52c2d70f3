from engine.scheduling.plan import Chunk, Plan, build_batch
from tests.engine.scheduling.harness import add, create_scheduler, step


def test_a_chunk_that_samples_after_each_token_has_a_row_for_each() -> None:
    scheduler = create_scheduler()
    seq = add(scheduler, 20)
    step(scheduler)
    scheduler.append(seq, [2, 3])  # two more than the one to compute next
    batch = build_batch(Plan(prefills=[Chunk(seq, 20, 3, 3, seq.choices)]), scheduler.table)
    assert [(row.row, row.position) for row in batch.samples] == [(0, 21), (1, 22), (2, 23)]
    assert [row.tokens[20:].tolist() for row in batch.samples] == [[1], [1, 2], [1, 2, 3]]
