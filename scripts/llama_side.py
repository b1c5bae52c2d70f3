"""Measures llama.cpp for `scripts/bench_llama.py`, which runs this file with the Python that has `llama-cpp-python`.

Each line of the input is a command in JSON, and each line of the output its result:

| command | result |
| --- | --- |
| {"load": path, "name": name} | null |
| {"measure": name, "streams": n, "prompt": tokens, "output": tokens} | seconds of all decodes, after the prompts |
| the same without output: 0 | seconds of the prompts |

Tokens are random, as in llama.cpp's own llama-bench: nothing is sampled.
"""

import ctypes
import json
import random
import sys
import time
from pathlib import Path

import llama_cpp as llama
from llama_cpp import _ggml

MAX_STREAMS, MAX_TOKENS = 8, 4096


class Model:
    """A model and its context, with a batch that is used again."""

    def __init__(self, path: str, threads: int) -> None:
        self._model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        settings = llama.llama_context_default_params()
        settings.n_ctx = MAX_TOKENS
        settings.n_batch = settings.n_ubatch = 512
        settings.n_seq_max = MAX_STREAMS
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, settings)
        if not self._context:
            raise SystemExit(f"llama.cpp can't load {path}")
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(512, 0, 1)

    def measure(self, streams: int, prompt: int, output: int) -> float:
        """Returns the seconds of the decodes of all streams, or of the prompts if no `output` is wanted."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        began = time.perf_counter()
        for stream in range(streams):
            self._decode([(position, stream) for position in range(prompt)])
        if output:
            began = time.perf_counter()
        for position in range(prompt, prompt + output):
            self._decode([(position, stream) for stream in range(streams)])
        return time.perf_counter() - began

    def _decode(self, places: list[tuple[int, int]]) -> None:
        """Computes random tokens at these positions of streams, and the logits of the last one of each stream."""
        batch = self._batch
        batch.n_tokens = len(places)
        for index, (position, stream) in enumerate(places):
            batch.token[index] = random.randrange(self._vocab_size)
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = stream
            batch.logits[index] = index + 1 == len(places) or places[index + 1][1] != stream
        if status := llama.llama_decode(self._context, batch):
            raise SystemExit(f"llama.cpp can't compute a step: {status}")
        llama.llama_synchronize(self._context)


def main() -> None:
    """Carries out the commands."""
    silence = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(silence, ctypes.c_void_p(0))
    # Builds for several processors have back ends in libraries of their own.
    _ggml.libggml.ggml_backend_load_all_from_path(str(Path(llama.__file__).parent / "lib").encode())
    llama.llama_backend_init()
    threads, models = int(sys.argv[1]), {}
    print(json.dumps(f"{llama.__version__}; {llama.llama_print_system_info().decode().strip()}"), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if path := command.get("load"):
            models[command["name"]] = Model(path, threads)
            result = None
        else:
            model = models[command["measure"]]
            result = model.measure(command["streams"], command["prompt"], command["output"])
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
