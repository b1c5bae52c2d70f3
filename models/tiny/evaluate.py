"""Evaluates the bundled model on cases that training never saw: `python -m models.tiny.evaluate [DIR]`.

The serving engine answers greedily, with its paged cache, in bfloat16, or with weights and pages of other formats. An
answer is right if it equals the expected one and the model stops by itself.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Literal

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from cpd.common.blocks import extend_hashes, hash_root
from cpd.performance.colocation import Colocation
from cpd.performance.model import PerfModel, Profile
from engine.engine import Engine
from engine.execution.runner import TorchRunner
from engine.model.config import Quantization
from engine.types import Request, SamplingParams
from models.tiny import CHECKPOINT
from models.tiny.data.cases import UNSEEN, Case, recall_case, request_case
from models.tiny.data.dialogue import said
from models.tiny.data.requests import KINDS, UNABLE
from models.tiny.make import TURN_END
from models.tiny.tokenizer import prompt, token_id

SEED = 1
LONGEST_ANSWER = 128
POOL_BYTES = 512 << 20


class Answerer:
    """A checkpoint in an engine."""

    def __init__(
        self, directory: Path, quantization: Quantization = "none", kv_dtype: Literal["auto", "int8"] = "auto"
    ) -> None:
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        runner = TorchRunner(
            directory,
            dtype="auto",
            device="cpu",
            kv_bytes=POOL_BYTES,
            max_model_len=0,
            quantization=quantization,
            kv_dtype=kv_dtype,
        )
        self._engine = Engine(
            runner,
            max_model_len=runner.config.max_model_len,
            colocation=Colocation(PerfModel(Profile.load("instant")), token_budget=2048),
            max_num_seqs=16,
            max_queue_tokens=1 << 30,
        )
        self._stop = token_id(self.tokenizer, TURN_END)

    def length(self, text: str) -> int:
        """Length of a text in tokens."""
        return len(self.tokenizer.encode(text).ids)

    def answers(self, cases: Sequence[Case]) -> list[str]:
        """The model's answers. One that does not stop is cut off."""
        root = hash_root(b"evaluation")
        said_ids: dict[str, list[int]] = {}
        for index, case in enumerate(cases):
            tokens = self.tokenizer.encode(prompt(case.messages)).ids
            params = SamplingParams(temperature=0.0, max_tokens=LONGEST_ANSWER, stop_token_ids=frozenset((self._stop,)))
            self._engine.add(Request(str(index), tokens, len(tokens), params, root, extend_hashes(root, tokens)))
            said_ids[str(index)] = []
        while self._engine.has_work:
            for output in self._engine.step().outputs:
                said_ids[output.request_id] += output.token_ids
        return [self._text(ids) for ids in said_ids.values()]

    def _text(self, ids: list[int]) -> str:
        end = ids.index(self._stop) if self._stop in ids else len(ids)
        return str(self.tokenizer.decode(ids[:end])) + ("" if end < len(ids) else " …")


def recall_cases(number: int, least: int, most: int, answerer: Answerer) -> list[Case]:
    """Questions about facts in dialogues of `least` to `most` tokens."""
    rng = Random(f"{SEED} {least} {most}")
    return [recall_case(rng, least, most, answerer.length) for _ in range(number)]


def main() -> None:
    """Evaluates a checkpoint and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=CHECKPOINT)
    parser.add_argument("--recall", type=int, default=300, help="questions about facts, for each prompt length")
    parser.add_argument("--requests", type=int, default=50, help="requests of each kind")
    parser.add_argument("--wrong", type=int, default=0, help="show up to this many wrong answers of each kind")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--kv-dtype", choices=("auto", "int8"), default="auto")
    arguments = parser.parse_args()

    answerer = Answerer(arguments.checkpoint, arguments.quantization, arguments.kv_dtype)
    cases = {
        "recall, under 100 tokens": recall_cases(arguments.recall, 20, 99, answerer),
        "recall, 100 to 2,000 tokens": recall_cases(arguments.recall, 100, 2000, answerer),
        "recall, 2,000 to 4,000 tokens": recall_cases(arguments.recall, 2000, 3960, answerer),
        "unseen requests": [Case((said("user", text),), UNABLE) for text in UNSEEN],
    }
    for kind in KINDS:
        rng = Random(f"{SEED} {kind.name}")
        cases[kind.name] = [request_case(rng, kind) for _ in range(arguments.requests)]

    console = Console()
    table = Table("kind", "cases", "right")
    for name, kind_cases in cases.items():
        answers = answerer.answers(kind_cases)
        wrong = [pair for pair in zip(kind_cases, answers, strict=True) if pair[0].answer != pair[1]]
        table.add_row(name, str(len(answers)), f"{1 - len(wrong) / len(answers):.1%}")
        for case, answer in wrong[: arguments.wrong]:
            console.print(f"[{name}] …{case.messages[-1]['content'][-100:]}", f"  {answer}", f"  not: {case.answer}",
                          sep="\n", markup=False)  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
