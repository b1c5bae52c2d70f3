"""Trains the bundled model: `python -m models.tiny.train [DIR]`. A second call resumes an interrupted training.

Dialogues, tokenizer and initial weights are made from a seed.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor

from models.tiny import CHECKPOINT
from models.tiny.batches import OTHER_WEIGHT, Batch, Sampler
from models.tiny.initial import initialise
from models.tiny.make import write_checkpoint
from models.tiny.network import Network, Shape
from models.tiny.tokenizer import train_tokenizer

SEED = 0
STEPS = 3700
TOKENS = 2048
"""Tokens of one step on each of two cores: recall or requests on the first, requests on the second."""

LENGTHS = (0, 64, 128, 256, 512, 1024, 2048, 4096)
LENGTH_SHARES = (6, 2, 2, 1, 1, 2, 2, 2)
LATE_SHARES = (6, 1, 1, 1, 1, 1, 2, 4)
"""Sequence lengths of recall batches, and their frequencies; 0 stands for a batch of requests."""

LEARNING_RATE, WARM_UP_STEPS = 1.5e-3, 60
OTHERS_SCORED = 0.1
"""Share of the tokens outside answers for which the loss is computed, to save time."""

LATE = 2300
"""From this step on, batches have more of the requests that are often answered wrong."""

RATE_STEPS, RATES = (780, 1850, LATE, 2350, 3100, STEPS), (1.0, 0.4, 0.0, 0.5, 0.3, 0.0)
"""Learning rate at some steps as a share of its peak, linear in between."""

TURN_LENGTHS = (64, 256)
"""Alternating sequence lengths of requests: many short dialogues, and long ones for the end of a long answer."""

SAVE_EVERY = 25


@dataclass(frozen=True)
class Score:
    """The network's results on one batch before learning from it."""

    loss: float
    answers: float
    """Share of the answers of which every token was predicted right, given the right tokens before."""


def train(directory: Path, checkpoint: Path, steps: int) -> None:
    """Trains for `steps` steps, keeping its state in `directory`, and writes the model to `checkpoint`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(SEED)
    network = Network(Shape(tokenizer.get_vocab_size()))
    trained = initialise(network, SEED)
    optimizers = _optimizers(network)
    sampler = Sampler(tokenizer, SEED)
    state = directory / "state.pt"
    first = _resume(state, network, optimizers)
    log = directory / "log.jsonl"
    replica = _replica(network)
    with _progress() as bar, ThreadPoolExecutor(2, initializer=_use_one_core) as pool:
        task = bar.add_task("training", total=steps, completed=first, note="")
        for step in range(first, steps):
            started = time.perf_counter()
            rate = _rate(step)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
            length, turns = _length(step), TURN_LENGTHS[step % 2]
            # with long recall sequences, its core has time for more
            talk = 2 * length if length == LENGTHS[-1] else TOKENS
            making = (
                partial(sampler.recall, step, TOKENS, length)
                if length
                else partial(sampler.small_talk, ~step, TOKENS, turns, step >= LATE)
            )
            learning = pool.submit(_learn, network, making, step)
            talking = pool.submit(_learn, replica, partial(sampler.small_talk, step, talk, turns, step >= LATE), step)
            learnt, talked = learning.result(), talking.result()
            for (name, parameter), copy in zip(network.named_parameters(), replica.parameters(), strict=True):
                assert parameter.grad is not None
                assert copy.grad is not None
                parameter.grad.add_(copy.grad).mul_(trained[name])
            replica.zero_grad()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            line = {
                "step": step, "length": length, "first": learnt.answers, "second": talked.answers,
                "first_loss": learnt.loss, "second_loss": talked.loss, "seconds": time.perf_counter() - started,
            }  # fmt: skip
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            recalled = f"{length} tokens: recall {learnt.answers:.0%}, " if length else ""
            note = f"{recalled}requests {talked.answers:.0%}"
            bar.update(task, advance=1, note=note)
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
                _save(state, network, optimizers, step + 1)
                write(network, tokenizer, directory / "checkpoint")
    write(network, tokenizer, checkpoint)


def write(network: Network, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the network as a checkpoint, with weights in bfloat16."""
    write_checkpoint(directory, asdict(network.shape), tokenizer, network.checkpoint())


def _replica(network: Network) -> Network:
    """A network that shares the weights but has its own gradients."""
    replica = Network(network.shape)
    for ours, theirs in zip(replica.parameters(), network.parameters(), strict=True):
        ours.data = theirs.data
    return replica


def _use_one_core() -> None:
    torch.get_num_threads()  # before the first call, a thread's setting may be overridden
    torch.set_num_threads(1)


def _learn(network: Network, make: Callable[[], Batch], step: int) -> Score:
    """Computes the gradient of half the batch's loss."""
    batch = make()
    targets, answers = batch.tokens[:, 1:].flatten(), batch.answers[:, 1:].flatten()
    chosen = torch.rand(len(targets), generator=torch.Generator().manual_seed(step)) < OTHERS_SCORED
    at = ((answers > 0) | chosen).nonzero()[:, 0]
    targets, answers = targets[at], answers[at]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = network(batch.tokens)[:, :-1].flatten(0, 1)
        scores = network.logits(hidden[at])
    losses = F.cross_entropy(scores.float(), targets, reduction="none")
    weights = torch.where(answers > 0, 1.0, OTHER_WEIGHT / OTHERS_SCORED)
    loss = (losses * weights).sum() / weights.sum()
    (loss / 2).backward()  # type: ignore[no-untyped-call]
    return Score(loss.item(), _answered(scores.argmax(-1) == targets, answers))


def _answered(right: Tensor, answers: Tensor) -> float:
    """Share of the answers (numbered per token in `answers`) of which every token is right."""
    wrong = torch.zeros(int(answers.max()) + 1, dtype=torch.long).index_add_(0, answers, (~right).long())
    there = torch.zeros_like(wrong).index_add_(0, answers, torch.ones_like(answers)) > 0
    there[0] = False
    return (wrong[there] == 0).float().mean().item()


def _optimizers(network: Network) -> list[torch.optim.Optimizer]:
    """Muon for the MLPs, AdamW for the rest."""
    named = dict(network.named_parameters())
    mlps = [p for name, p in named.items() if "mlp" in name]
    others = [p for name, p in named.items() if "mlp" not in name]
    return [
        torch.optim.Muon(mlps, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def _rate(step: int) -> float:
    """The learning rate, with a linear warm-up."""
    return LEARNING_RATE * min((step + 1) / WARM_UP_STEPS, float(np.interp(step, RATE_STEPS, RATES)))


def _length(step: int) -> int:
    """Sequence length of a step."""
    return Random(f"length {step}").choices(LENGTHS, LATE_SHARES if step >= LATE else LENGTH_SHARES)[0]


def _save(file: Path, network: Network, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    partly = file.with_suffix(".partly")
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"network": network.state_dict(), "optimizers": states, "step": step}, partly)
    os.replace(partly, file)


def _resume(file: Path, network: Network, optimizers: list[torch.optim.Optimizer]) -> int:
    """Loads the saved state, if there is one. Returns the number of steps done."""
    if not file.exists():
        return 0
    saved = torch.load(file, weights_only=True)
    network.load_state_dict(saved["network"])
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    return int(saved["step"])


def _progress() -> Progress:
    times = MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(TextColumn("{task.description}"), BarColumn(), *times, TextColumn("{task.fields[note]}"))


def main() -> None:
    """Trains the model as the command line tells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=CHECKPOINT, help="where to write the model")
    parser.add_argument("--state", type=Path, default=Path("train-tiny"), help="folder to save and resume training in")
    parser.add_argument("--steps", type=int, default=STEPS, help="number of steps in all")
    arguments = parser.parse_args()
    train(arguments.state, arguments.checkpoint, arguments.steps)


if __name__ == "__main__":
    main()
