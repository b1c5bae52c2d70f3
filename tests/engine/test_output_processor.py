from engine.batch import Sampled
from engine.output_processor import OutputProcessor
from engine.scheduling.plan import Chunk, Plan
from engine.types import Finish, StepOutput
from tests.engine.fakes import make_request, prompt
from tests.engine.scheduling.harness import create_scheduler


def test_a_decode_of_several_tokens_is_one_output_and_publishes_their_blocks() -> None:
    scheduler = create_scheduler()
    outputs = OutputProcessor(scheduler, lambda seq, pages: scheduler.pool.release(pages))
    seq = outputs.open(make_request("a", prompt(20), max_tokens=30), [0])
    scheduler.add(seq)
    step = StepOutput()
    outputs.process(scheduler.schedule(), [Sampled(1)], step)
    assert scheduler.add_page_to_each([seq])
    outputs.process(Plan(prefills=[Chunk(seq, 20, 13, 13, seq.choices)]), [Sampled(n) for n in range(13)], step)
    assert [output.token_ids for output in step.outputs] == [[1], list(range(13))]
    assert (seq.num_tokens, seq.num_computed, seq.num_published) == (34, 33, 2)
    assert outputs.decode_tokens == 13
    outputs.process(Plan(prefills=[Chunk(seq, 33, 16, 16, seq.choices)]), [Sampled(n) for n in range(16)], step)
    assert step.outputs[-1].finish is Finish.LENGTH
    assert not outputs.seqs()
