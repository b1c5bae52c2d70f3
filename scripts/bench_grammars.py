"""Measures outputs that follow grammars: `python -m scripts.bench_grammars` from the repository's root.

1. Schemas (`--only schemas`, needs `--schemas DIR`): of 1,000 JSON schemas, drawn with a fixed seed and equally over
   the folders of DIR, how many are accepted; how many of their documents finish and are valid by `jsonschema`, at
   temperature 1, with random weights and with the bundled model; what compiling and masks cost. JSONSchemaBench's
   `data` folder (https://github.com/guidance-ai/jsonschemabench) is such a DIR.
2. Speed (`--only speed`): tokens a second over HTTP of 16 streams with a schema, and of as many without, in turn.
3. Forced tokens (`--only forced`): tokens a second of 16 documents whose schema says most of their text, with forced
   tokens and without, in one process.
4. Masks (`--only masks`): what a row's mask and its other work cost in a step with a vocabulary of 152 thousand tokens,
   for two schemas, and 98 of DIR if it is given.
5. Bombs (`--only bombs`): gaps of 16 streams beside requests with schemas and expressions that are made to take long,
   which come one after the other (`--pause`: with pauses), and without them, in turns within one run.

The model of 2 to 5 is that of `scripts/bench_main_path.py`, except for the vocabulary of 4.
"""

import argparse
import importlib
import json
import math
import random
import re
import statistics
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
from rich.console import Console

from bench.load.plan import Plan
from bench.load.run import run_load
from bench.prepare import prepare
from bench.record import Failure
from bench.report.progress import LiveProgress
from bench.result import Summary
from bench.run import measure
from bench.settings import RunSettings
from cpd.grammar import grammar as grammars
from cpd.grammar.compiler import CompiledGrammar, Vocabulary, check
from cpd.grammar.grammar import GrammarError
from engine.execution.cpu.lanes import own_cores, use_threads
from engine.scheduling.plan import MAX_DECODE_TOKENS
from engine.types import Finish
from models import tiny
from models.tiny.make import train_bpe, write
from scripts.bench_main_path import MODEL, ONE_COMBINED
from scripts.constrained import ConstrainedEngine, Document, timed
from scripts.others import other_cpu_s
from scripts.streams import MODEL_NAME, machine
from tests.e2e.cluster import Cluster

STREAMS = 16
SEED = 29
LARGE_VOCABULARY = 151_936
WARM_S = 4.0
"""Time before the first turn of a run."""
MAX_OTHERS = 0.06
"""Pairs of turns count only if other processes kept at most this many cores busy."""
SETTLE_S = 0.3
"""Start of a turn that is not counted, in which the work of the turn before ends."""
LISTS: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["small", "large", "other"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        },
        "required": ["name", "kind", "count"],
        "additionalProperties": False,
    },
    "minItems": 40,
}
"""Its documents are longer than those that are measured."""

RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"type": "integer", "minimum": 0, "maximum": 99999},
        "preferred_contact_method": {"enum": ["electronic_mail", "telephone_call", "postal_service"]},
        "subscription_renewal_status": {"enum": ["renewed_automatically", "cancelled_by_customer", "payment_failed"]},
        "last_successful_payment_year": {"type": "integer", "minimum": 1990, "maximum": 2030},
        "accepts_marketing_messages": {"type": "boolean"},
        "assigned_support_department": {"enum": ["technical_assistance", "billing_department", "general_questions"]},
    },
    "required": [
        "customer_identification_number",
        "preferred_contact_method",
        "subscription_renewal_status",
        "last_successful_payment_year",
        "accepts_marketing_messages",
        "assigned_support_department",
    ],
    "additionalProperties": False,
}
"""A schema that says most of its documents' text."""


def bombs(mark: int) -> Iterator[dict[str, Any]]:
    """Fields of requests that are made to take long.

    Args:
        mark: Makes them differ from those with another number: what was once checked is remembered.
    """
    own = {"$comment": str(mark)}
    cases = [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(4)]} for i in range(12)]
    yield {"guided_json": own | {"type": "object", "allOf": cases}}
    links = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"items": {"$ref": f"#/$defs/d{i + 1}"}}]}
        for i in range(200)
    }
    yield {"guided_json": own | {"$defs": links | {"d200": {"type": "null"}}, "$ref": "#/$defs/d0"}}
    yield {"guided_json": own | {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}, "$ref": "#/$defs/a"}}
    yield {"guided_json": own | {"type": "array", "items": {"enum": [f"{i:04}" * 30 for i in range(500)]}}}
    for expression in ("(((a{1,99}){1,99}){1,99}){1,99}", "(a|b)*a(a|b){40}", "(.*a){25}"):
        yield {"guided_regex": f"{expression}|{mark}"}
    rules = "".join(f"\nr{i}: /a+/" for i in range(250))
    yield {"guided_grammar": f"// {mark}\nstart: {' '.join(f'r{i}' for i in range(250))}{rules}"}


def draw(folder: Path, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Draws schemas equally over the folders of `folder`; a folder with fewer than its part gives all it has.

    Returns:
        The folder's name and the schema, of each.
    """
    sets: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.rglob("*.json")):
        sets[path.parent.name].append(path)
    rng, drawn = random.Random(SEED), list[tuple[str, Path]]()
    for place, (name, paths) in enumerate(sorted(sets.items(), key=lambda item: len(item[1]))):
        part = (count - len(drawn)) // (len(sets) - place)
        drawn += [(name, path) for path in rng.sample(paths, min(part, len(paths)))]
    return [(name, json.loads(path.read_text())) for name, path in drawn]


def percentiles(values: Sequence[float]) -> str:
    """The median, the 99th percentile and the largest of some values."""
    p50, p99 = np.percentile(values, [50, 99])
    return f"p50 {p50:.3g}, p99 {p99:.3g}, max {max(values):.3g}"


def is_valid(document: str, schema: dict[str, Any]) -> bool | None:
    """True if a document is valid by its schema; None if `jsonschema` can't tell."""
    validators = importlib.import_module("jsonschema.validators")
    try:
        validator = validators.validator_for(schema, default=validators.Draft202012Validator)(schema)
        return bool(validator.is_valid(json.loads(document)))
    except json.JSONDecodeError:
        return False
    except Exception as error:  # its regular expressions and references are others
        print(f"jsonschema can't tell: {str(error)[:150]}")
        return None


def measure_schemas(checkpoint: Path, schemas: Sequence[tuple[str, dict[str, Any]]], max_tokens: int) -> None:
    """Measures and prints what becomes of the schemas with one model."""
    engine = ConstrainedEngine(checkpoint, streams=STREAMS, max_len=max_tokens + 64)
    compiled: list[CompiledGrammar] = []
    accepted: list[tuple[str, dict[str, Any]]] = []
    reasons, check_ms, compile_ms = Counter[str](), list[float](), list[float]()
    for name, schema in schemas:
        try:
            begun_s = time.perf_counter()
            grammar = grammars.json_schema(schema)
            check(grammar)
            checked_s = time.perf_counter()
            compiled.append(engine.vocabulary.compile(grammar))
            check_ms.append(1e3 * (checked_s - begun_s))
            compile_ms.append(1e3 * (time.perf_counter() - checked_s))
            accepted.append((name, schema))
        except GrammarError as error:
            reasons[_kind(str(error))] += 1
    print(f"{len(accepted)} of {len(schemas)} accepted ({len(accepted) / len(schemas):.1%}); refused:")
    for reason, count in reasons.most_common():
        print(f"  {count:4} {reason}")
    print(f"check ms: {percentiles(check_ms)}; compile ms: {percentiles(compile_ms)}")
    with timed(("mask", "advance")) as ms:
        documents = engine.run(compiled, max_tokens)
    print(f"a row and step, ms: mask {percentiles(ms['mask'])}; other {percentiles(ms['advance'])}")
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for (name, schema), document in zip(accepted, documents, strict=True):
        outcome = _outcome(engine, document, schema)
        outcomes[name][outcome] += 1
        outcomes["all"][outcome] += 1
        if outcome == "invalid":
            print(f"invalid: {json.dumps(schema)[:2000]}\n  {engine.text(document)[:500]}")
    print(f"{'':16} accepted  valid  unknown  cut  failed  invalid  finished")
    for name, counts in outcomes.items():
        total, finished = counts.total(), counts["valid"] + counts["unknown"] + counts["invalid"]
        row = "".join(f"{counts[outcome]:8}" for outcome in ("valid", "unknown", "cut", "failed", "invalid"))
        print(f"{name:16} {total:8} {row}   {finished / total:.1%}")


def _outcome(engine: ConstrainedEngine, document: Document, schema: dict[str, Any]) -> str:
    if document.error:
        print(f"failed: {document.error[:200]}")
        return "failed"
    if document.finish is not Finish.STOP:
        return "cut"
    return {True: "valid", False: "invalid", None: "unknown"}[is_valid(engine.text(document), schema)]


def _kind(reason: str) -> str:
    """What reasons of one kind have in common."""
    return re.sub(r"\d+", "N", reason.split(" (")[0])[:110]


def measure_forced(checkpoint: Path, repeats: int) -> None:
    """Measures and prints documents with forced tokens, and without."""
    engine = ConstrainedEngine(checkpoint, streams=STREAMS, max_len=1024)
    compiled = engine.vocabulary.compile(grammars.json_schema(RECORD))
    rates: dict[str, list[float]] = {"with": [], "without": []}
    first = engine.run([compiled] * 4 * STREAMS, 512)  # warms up
    for _ in range(repeats):
        for name, tokens in (("with", MAX_DECODE_TOKENS), ("without", 1)):
            begun_s = time.perf_counter()
            with patch("engine.output_processor.MAX_DECODE_TOKENS", tokens):
                documents = engine.run([compiled] * 4 * STREAMS, 512)
            total = sum(len(document.token_ids) for document in documents)
            rates[name].append(total / (time.perf_counter() - begun_s))
            same = sum(one.token_ids == other.token_ids for one, other in zip(documents, first, strict=True))
            print(
                f"{name:8} {rates[name][-1]:8.0f} tok/s, {total / len(documents):.0f} tokens a document; "
                f"{same} of {len(documents)} are those of the first run"  # by rounding, others may differ
            )
    ratios = [ours / theirs for ours, theirs in zip(rates["with"], rates["without"], strict=True)]
    print(f"forced tokens: {statistics.median(ratios):.2f} x (goal 1.3; {min(ratios):.2f} to {max(ratios):.2f})")


def measure_masks(schemas: Sequence[dict[str, Any]], steps: int) -> None:
    """Measures and prints what grammars cost with a large vocabulary, on random ways through them."""
    tokenizer = train_bpe(islice(_texts(), 6000), LARGE_VOCABULARY, max_token_bytes=128)
    begun_s = time.perf_counter()
    vocabulary = Vocabulary(tokenizer.to_str(), LARGE_VOCABULARY, [0])
    print(f"{tokenizer.get_vocab_size()} tokens, loaded in {time.perf_counter() - begun_s:.1f} s")
    rng = np.random.default_rng(SEED)
    with timed(("mask", "advance")) as ms:
        for schema in schemas:
            constraint = vocabulary.compile(grammars.json_schema(schema)).constraint([0]).fork(steps)
            left = steps
            while left > 0 and not constraint.error:
                bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
                got = constraint.advance(int(rng.choice(np.flatnonzero(bits))), 16)
                left -= len(got)
                if 0 in got:
                    break
    print(f"a row and step, ms: mask {percentiles(ms['mask'])}; other {percentiles(ms['advance'])}")


def _texts() -> Iterator[str]:
    """Source texts of Python and its packages."""
    for path in sorted(Path(np.__file__).parents[1].rglob("*.py")):
        yield path.read_text(errors="replace")


def measure_speed(model: Path, repeats: int, requests: int) -> None:
    """Measures and prints the rate of streams with a schema and without, in turn."""
    asked: dict[str, dict[str, Any]] = {
        "with": {"guided_json": LISTS, "temperature": 1, "ignore_eos": False},
        "without": {"temperature": 1},
    }
    rates: dict[str, list[float]] = {name: [] for name in asked}
    with Cluster(model=str(model), served_model_name=MODEL_NAME, dtype="auto", **ONE_COMBINED) as cluster:
        for fields in asked.values():
            _load(cluster, model, 2 * STREAMS, fields)  # warms up
        for number in range(repeats):
            for name, fields in list(asked.items())[:: -1 if number % 2 else 1]:
                begun_s, others_s = time.perf_counter(), other_cpu_s()
                summary = _load(cluster, model, requests, fields)
                others = (other_cpu_s() - others_s) / (time.perf_counter() - begun_s)
                rates[name].append(summary.output_tokens_per_s or 0.0 if others <= MAX_OTHERS else math.nan)
                print(
                    f"{name:8} {summary.output_tokens_per_s:8.0f} tok/s   ITL p50 {summary.itl_ms.p50:.2f} "
                    f"p99 {summary.itl_ms.p99:.2f} ms"
                    + (
                        f"   not counted: {others:.2f} cores were busy with other processes"
                        if others > MAX_OTHERS
                        else ""
                    )
                )
    ratios = [ours / theirs for ours, theirs in zip(rates["with"], rates["without"], strict=True)]
    ratios = [ratio for ratio in ratios if not math.isnan(ratio)]
    if not ratios:
        return
    low, median, high = np.percentile(ratios, [25, 50, 75])
    print(
        f"with a schema {median:.2f} x (goal 0.9; half of the pairs {low:.2f} to {high:.2f}, "
        f"all {len(ratios)} {min(ratios):.2f} to {max(ratios):.2f})"
    )


def measure_bombs(model: Path, repeats: int, turn_s: float, pause_s: float) -> None:
    """Measures and prints the gaps of streams beside bombs and without them, in turns within one run."""
    throwing, over = threading.Event(), threading.Event()
    with (
        Cluster(model=str(model), served_model_name=MODEL_NAME, dtype="auto", **ONE_COMBINED) as cluster,
        ThreadPoolExecutor() as threads,
        LiveProgress(Console(stderr=True)) as progress,
    ):
        settings = _settings(cluster, model, 1 << 20, {})
        prepared = prepare(settings)
        plan = Plan(prepared.target, settings, prepared.texts, prepared.seed, processes=1)
        try:
            thrown = threads.submit(_throw, cluster.url, throwing, over, pause_s)
            taken = threads.submit(_take_turns, throwing, over, 2 * repeats, turn_s)
            records = run_load(plan, progress, lambda *_: over.is_set()).records
        finally:
            over.set()
    if errors := Counter(record.error for record in records if record.error not in ("", Failure.ABORTED)):
        raise RuntimeError(f"not all requests completed: {errors}")
    chunks = [np.array(record.content_s) for record in records if record.content_s]
    ends_s = np.concatenate([times[1:] for times in chunks])
    gaps_ms = 1e3 * np.concatenate([np.diff(times) for times in chunks])
    rows: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    turns = taken.result()
    for pair in zip(turns[::2], turns[1::2], strict=True):
        if max(turn.others for turn in pair) <= MAX_OTHERS:
            for turn in pair:
                gaps = gaps_ms[(ends_s >= turn.start_s) & (ends_s < turn.end_s)]
                rows[turn.beside].append((*np.percentile(gaps, [50, 99]), len(gaps) / (turn.end_s - turn.start_s)))
    print(f"{len(rows[True])} pairs of turns of {repeats}; beside the others, other processes ran")
    if not rows[True]:
        return
    for name, figures in (("alone", rows[False]), ("beside bombs", rows[True])):
        p50, p99, rate = np.median(figures, axis=0)
        print(f"{name:12} ITL p50 {p50:.2f}, p99 {p99:.2f} ms, {rate:.0f} gaps a second (medians)")
    answers = thrown.result()
    by_status = Counter(status for status, _ in answers)
    longest = {status: max(seconds for other, seconds in answers if other == status) for status in by_status}
    print(f"answers to bombs: {dict(by_status)}; the slowest, s: { {key: round(s, 2) for key, s in longest.items()} }")
    ratios = [own[1] / other[1] for own, other in zip(rows[True], rows[False], strict=True)]
    low, median, high = np.percentile(ratios, [25, 50, 75])
    print(f"beside bombs ITL p99 is {median:.2f} x (goal 1.2; half of the pairs {low:.2f} to {high:.2f})")


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a run, on the clock of `bench.record`.

    Attributes:
        beside: Whether bombs were thrown.
        others: Cores that other processes kept busy.
    """

    beside: bool
    start_s: float
    end_s: float
    others: float


def _take_turns(throwing: threading.Event, over: threading.Event, count: int, turn_s: float) -> list[Turn]:
    """Takes turns without bombs and with them, in the order A B B A, and ends the run."""
    turns = []
    try:
        time.sleep(WARM_S)
        for number in range(count):
            beside = number % 4 in (1, 2)
            (throwing.set if beside else throwing.clear)()
            time.sleep(SETTLE_S)
            start_s, others_s = time.perf_counter(), other_cpu_s()
            time.sleep(turn_s)
            end_s = time.perf_counter()
            turns.append(Turn(beside, start_s, end_s, (other_cpu_s() - others_s) / (end_s - start_s)))
    finally:
        over.set()
    return turns


def _throw(url: str, throwing: threading.Event, over: threading.Event, pause_s: float) -> list[tuple[str, float]]:
    """Sends bombs, one after the other, while `throwing` is set. Returns the status and the seconds of each answer."""
    answers: list[tuple[str, float]] = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for bomb in chain.from_iterable(map(bombs, iter(time.time_ns, 0))):
            while not throwing.wait(0.1) and not over.is_set():
                pass
            if over.is_set():
                return answers
            body = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 32, **bomb}
            begun_s = time.perf_counter()
            try:
                answer = str(client.post("/v1/completions", json=body).status_code)
            except httpx.HTTPError as error:
                answer = type(error).__name__
            answers.append((answer, time.perf_counter() - begun_s))
            over.wait(pause_s)
    return answers


def _settings(cluster: Cluster, model: Path, requests: int, fields: dict[str, Any]) -> RunSettings:
    return RunSettings.load(
        {
            "url": cluster.url,
            "endpoint": "completions",
            "tokenizer": str(model),
            "input_len": "64",
            "output_len": "256",
            "concurrency": STREAMS,
            "num_requests": requests,
            "extra_body": json.dumps(fields) if fields else "",
        }
    )


def _load(cluster: Cluster, model: Path, requests: int, fields: dict[str, Any]) -> Summary:
    settings = _settings(cluster, model, requests, fields)
    with LiveProgress(Console(stderr=True)) as progress:
        summary = measure(settings, prepare(settings), None, None, progress).summary
    if summary.completed != requests:
        raise RuntimeError(f"not all requests completed: {summary.errors}")
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("schemas", "speed", "forced", "masks", "bombs")
    parser.add_argument("--only", choices=parts, help="measure only this part")
    parser.add_argument("--schemas", type=Path, metavar="DIR", help="folder with JSON schemas in folders")
    parser.add_argument("--count", type=int, default=1000, help="number of schemas")
    parser.add_argument("--max-tokens", type=int, default=1024, help="limit on the tokens of a document")
    parser.add_argument("--repeats", type=int, default=5, help="number of runs or turns of each kind")
    parser.add_argument("--requests", type=int, default=192, help="requests in a run of the part speed")
    parser.add_argument("--turn", type=float, default=2.0, metavar="S", help="seconds of a turn of the part bombs")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="seconds between one bomb and the next")
    arguments = parser.parse_args()
    if arguments.only == "schemas" and arguments.schemas is None:
        parser.error("--only schemas needs --schemas")

    def wanted(part: str) -> bool:
        return arguments.only in (None, part)

    print(machine())
    drawn = draw(arguments.schemas, arguments.count) if arguments.schemas else []
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        write(model, **MODEL)
        if wanted("speed"):
            measure_speed(model, arguments.repeats, arguments.requests)
        if wanted("bombs"):
            measure_bombs(model, arguments.repeats, arguments.turn, arguments.pause)
        use_threads(own_cores())
        if wanted("schemas") and drawn:
            for name, checkpoint in (("random weights", model), ("the bundled model", tiny.CHECKPOINT)):
                print(f"--- {name}")
                measure_schemas(checkpoint, drawn, arguments.max_tokens)
        if wanted("forced"):
            measure_forced(model, arguments.repeats)
        if wanted("masks"):
            measure_masks([LISTS, RECORD, *islice(_accepted(drawn), 98)], 200)


def _accepted(drawn: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Accepted schemas, in a random order."""
    for _, schema in random.Random(SEED).sample(drawn, len(drawn)):
        try:
            check(grammars.json_schema(schema))
        except GrammarError:
            continue
        yield schema


if __name__ == "__main__":
    main()
