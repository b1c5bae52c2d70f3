from cpd.perfmodel import PerfModel, Work
from engine.profile.rough import time_a_few_steps
from engine.runner import TorchRunner
from tests.conftest import MakeCheckpoint


def test_a_few_steps_make_a_model_in_which_more_tokens_never_take_less(checkpoint: MakeCheckpoint) -> None:
    runner = TorchRunner(checkpoint("qwen3"), dtype="auto", device="cpu", kv_bytes=1 << 20, max_model_len=0)
    model = PerfModel(time_a_few_steps(runner, runner.config.max_model_len, device="d", model="m"))
    short, long = Work.prefill(16), Work.prefill(512)
    assert 0 < model.step_ms(short) <= model.step_ms(long)
    assert 0 < model.step_ms(Work.decode(1, 100)) <= model.step_ms(Work.decode(8, 800))
    assert model.step_ms(long, 0.5) == 2 * model.step_ms(long)


def test_the_smallest_pool_and_context_do(checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint("qwen3")
    runner = TorchRunner(directory, dtype="auto", device="cpu", kv_bytes=1 << 17, max_model_len=12)
    assert runner.num_pages < 8
    assert PerfModel(time_a_few_steps(runner, 12, device="d", model="m")).step_ms(Work.prefill(12)) > 0
