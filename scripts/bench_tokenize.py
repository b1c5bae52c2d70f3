"""Measures the router's cost of a chat's next turn: tokenising and hashing.

    python -m scripts.bench_tokenize [--model DIR] [--turns 20] [--chars 1600]

Every turn sends the whole chat so far again. A line is one request: `whole` is the time to tokenise its text at once,
`tail` the time if the turns before are in the cache. Best of 20.
"""

import argparse
import asyncio
import random
import time
from pathlib import Path
from string import ascii_lowercase

from cpd.common.blocks import TOKEN_BYTES, extend_hashes, hash_root, pack_tokens
from models.tiny import CHECKPOINT
from router.text.text_files import load_text_files
from router.text.tokenizer import Tokenizer

REPEATS = 20


async def _measure(model: Path, turns: int, chars: int) -> None:
    files = load_text_files(model)
    if files.template is None:
        raise SystemExit(f"{model} has no chat template")
    rng = random.Random(0)
    messages = [{"role": "system", "content": _text(rng, chars)}]
    texts: list[str] = []
    for _ in range(turns):
        messages.append({"role": "user", "content": _text(rng, chars)})
        texts.append(files.template.render(messages))
        messages.append({"role": "assistant", "content": _text(rng, chars)})
    whole = [float("inf")] * turns
    tail, hashing = list(whole), list(whole)
    for _ in range(REPEATS):
        tokenizer = Tokenizer(files.tokenizer.backend)
        for turn, text in enumerate(texts):
            started = time.perf_counter()
            ids = await tokenizer.encode_chat(text, b"")
            tail[turn] = min(tail[turn], time.perf_counter() - started)
            started = time.perf_counter()
            expected = tokenizer.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            whole[turn] = min(whole[turn], time.perf_counter() - started)
            started = time.perf_counter()
            extend_hashes(hash_root(b"model"), ids)
            hashing[turn] = min(hashing[turn], time.perf_counter() - started)
            if ids != pack_tokens(expected):
                raise SystemExit("the tokens differ")
    print("| turn | characters | tokens | whole, ms | tail, ms | ratio | hashes, ms |")
    print("| --- " * 7 + "|")
    for turn in sorted({0, 1, turns // 4, turns // 2, turns - 1}):
        tokens = len(await files.tokenizer.encode_chat(texts[turn], b"")) // TOKEN_BYTES
        ratio = whole[turn] / tail[turn]
        print(
            f"| {turn + 1} | {len(texts[turn]):,} | {tokens:,} | {whole[turn] * 1e3:.2f} | {tail[turn] * 1e3:.2f} "
            f"| {ratio:.1f} | {hashing[turn] * 1e3:.2f} |"
        )


def _text(rng: random.Random, chars: int) -> str:
    words = ("".join(rng.choices(ascii_lowercase, k=rng.randint(1, 8))) for _ in range(chars))
    return " ".join(words)[:chars]


def main() -> None:
    """Measures all turns and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="checkpoint directory")
    parser.add_argument("--turns", type=int, default=20, help="turns of the chat")
    parser.add_argument("--chars", type=int, default=1_600, help="characters of each message")
    arguments = parser.parse_args()
    asyncio.run(_measure(arguments.model, arguments.turns, arguments.chars))


if __name__ == "__main__":
    main()
