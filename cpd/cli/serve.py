"""`cpd serve MODEL`: what `vllm serve MODEL` is, with one combined worker. Translates vLLM's flags to `cpd up`'s.

Flags that both have mean the same. A flag that would change what is served is never dropped.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from cpd.common.errors import ConfigError

RENAMED: Mapping[str, str] = {
    "--api-server-count": "--routers",
    "--data-parallel-size": "--combined",
    "--gpu-memory-utilization": "--gpu-memory",
    "--max-num-batched-tokens": "--token-budget",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
}
"""Flags that have another name here."""

SHORT: Mapping[str, str] = {
    "-asc": "--api-server-count",
    "-dp": "--data-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
}

WITHOUT_EFFECT: Mapping[str, str] = {
    "--allow-credentials": "keys are in headers, which pages set themselves; there are no cookies",
    "--disable-log-requests": "each call is one log line, without its texts",
    "--disable-log-stats": "the summary is one line a minute",
    "--enable-auto-tool-choice": "always so, where the model's chat template has tools",
    "--enable-chunked-prefill": "always so",
    "--enable-prefix-caching": "always so",
    "--enforce-eager": "CUDA graphs do not change results",
    "--no-enable-log-requests": "each call is one log line, without its texts",
    "--trust-remote-code": "code of a checkpoint is never run",
}
"""Flags without a value that are dropped, and why nothing is lost."""

ONE_VALUE: Mapping[str, Mapping[str, Sequence[str]]] = {
    "--allowed-headers": {'["*"]': ()},
    "--allowed-methods": {'["*"]': ()},
    "--generation-config": {"auto": (), "vllm": ("--sampling-defaults", "openai")},
    "--kv-cache-dtype": {"auto": ()},
    "--pipeline-parallel-size": {"1": ()},
    "--seed": {"0": ()},
    "--task": {"auto": (), "generate": ()},
    "--tensor-parallel-size": {"1": ()},
    "--tokenizer-mode": {"auto": (), "hf": ()},
}
"""Flags of which only these values are taken, with what they become."""

OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "--quantization": {"compressed-tensors": "none", "gguf": "none"},  # a checkpoint shows how it is quantised
    "--reasoning-parser": {"deepseek_r1": "think", "qwen3": "think"},
    "--tool-call-parser": {"llama4_pythonic": "pythonic"},
}
"""Flags of both of which some values have another name here."""

LISTS = ("--allowed-origins",)
"""Flags whose values are JSON lists in vLLM."""

MISSING: Mapping[str, str] = {
    "--chat-template": "the model's own template is used",
    "--enable-lora": "adapters are not supported",
    "--reasoning-config": "reasoning is known by its tags; thinking_token_budget works without",
    "--speculative-config": "speculative decoding is not supported",
    "--tokenizer": "the checkpoint's own tokenizer is used",
}
"""Flags that would change what is served."""


def translated(model: str, arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of `cpd up` for those of `vllm serve MODEL`.

    Raises:
        ConfigError: A flag asks for what this server does not have.
    """
    result = ["--model", model, "--prefill", "0", "--combined", "1"]
    parts = iter(_split(arguments))
    for part in parts:
        flag = SHORT.get(part, part)
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        if flag in MISSING:
            raise ConfigError(f"{part} of vLLM: {MISSING[flag]}")
        if flag in WITHOUT_EFFECT:
            continue
        if flag in ONE_VALUE:
            values, value = ONE_VALUE[flag], next(parts, "")
            if value not in values:
                raise ConfigError(f"{part} {value} of vLLM is not supported; it may be {' or '.join(values)}")
            result += values[value]
            continue
        result.append(RENAMED.get(flag, flag))
        if flag in OTHER_NAMES:
            value = next(parts, "")
            result.append(OTHER_NAMES[flag].get(value, value))
        elif flag in LISTS:
            result.append(_listed(next(parts, "")))
    return result


def _listed(value: str) -> str:
    """Returns a JSON list of texts with commas; any other value as it is."""
    try:
        texts = json.loads(value)
    except ValueError:
        return value
    return ",".join(map(str, texts)) if isinstance(texts, list) else value


def _split(arguments: Sequence[str]) -> Iterator[str]:
    """Splits `--flag=value` in two."""
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if argument.startswith("-") and equals:
            yield from (flag, value)
        else:
            yield argument
