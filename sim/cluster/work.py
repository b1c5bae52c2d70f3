"""Device time of prompts and decodes in large batches, independent of how they are batched.

The fixed cost of a step, such as reading the weights, is left out.
"""

from cpd.performance.model import PerfModel, Work

PROMPTS, DECODES = Work.prefill(8192), Work.decode(2, 1000)
"""Batches to which work is added."""


def prompts_s(model: PerfModel, work: Work, share: float = 1.0, beside: Work | None = None) -> float:
    """Returns the device time of prompts. Arguments as in `PerfModel.step_ms`."""
    return _more_s(model, PROMPTS, work, share, beside)


def decodes_s(model: PerfModel, work: Work, share: float = 1.0, beside: Work | None = None) -> float:
    """Returns the device time of decodes, each counted with their mean context."""
    if not work.seqs:
        return 0.0
    return work.seqs * _more_s(model, DECODES, Work.decode(1, work.context // work.seqs), share, beside)


def _more_s(model: PerfModel, batch: Work, work: Work, share: float, beside: Work | None) -> float:
    return (model.step_ms(batch + work, share, beside) - model.step_ms(batch, share, beside)) / 1e3
