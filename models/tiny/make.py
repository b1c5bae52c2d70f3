"""Writes checkpoints: a Qwen3 model with a byte-level BPE tokenizer and a chat template.

`python -m models.tiny.make DIR` writes random weights of any size, for benchmarks and tests. Answers are noise; the
tokenizer is trained on the texts of Python's `help()`. Equal versions of Python and tokenizers write equal bytes.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 2048
SEED = 0

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nA call is <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>. Tools:\\n' }}
{%- for tool in tools %}
{{- (tool | tojson) + '\\n' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
"""The tools, then the messages. Models are not trained on tools: forced calls are valid by their grammar."""

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}
"""config.json fields of a model with 0.7 million parameters."""


def train_bpe(
    texts: Iterator[str],
    vocab_size: int,
    splits: Sequence[Any] = (),
    min_frequency: int = 0,
    max_token_bytes: int | None = None,
) -> Tokenizer:
    """Trains a byte-level BPE tokenizer of at most `vocab_size` tokens, special tokens first.

    Args:
        texts: Texts to train on.
        vocab_size: Largest size of the vocabulary.
        splits: Pre-tokenizers that split the text first.
        min_frequency: Least occurrences of a merged pair.
        max_token_bytes: Length of the longest token; None: no limit.
    """
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level]) if splits else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        max_token_length=max_token_bytes,
        special_tokens=[AddedToken(name, special=True) for name in (END_OF_TEXT, TURN_START, TURN_END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def make_weights(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Random bfloat16 weights by their Hugging Face names. Linear weights are [out, in]."""
    generator = torch.Generator().manual_seed(SEED)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def linear(out: int, into: int) -> torch.Tensor:
        return (torch.randn(out, into, generator=generator) * float(into**-0.5)).to(torch.bfloat16)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    weights = {"model.embed_tokens.weight": linear(config["vocab_size"], hidden), "model.norm.weight": ones(hidden)}
    for layer in range(config["num_hidden_layers"]):
        tensors = {
            "input_layernorm": ones(hidden),
            "self_attn.q_proj": linear(q, hidden),
            "self_attn.k_proj": linear(kv, hidden),
            "self_attn.v_proj": linear(kv, hidden),
            "self_attn.o_proj": linear(hidden, q),
            "self_attn.q_norm": ones(head),
            "self_attn.k_norm": ones(head),
            "post_attention_layernorm": ones(hidden),
            "mlp.gate_proj": linear(inner, hidden),
            "mlp.up_proj": linear(inner, hidden),
            "mlp.down_proj": linear(hidden, inner),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in tensors.items()}
    return weights


def write_checkpoint(
    directory: Path, sizes: Mapping[str, Any], tokenizer: Tokenizer, weights: dict[str, torch.Tensor]
) -> None:
    """Writes a whole checkpoint to `directory`.

    Args:
        directory: Where to write.
        sizes: config.json fields of the model, at least those of `SIZES`.
        tokenizer: Its tokenizer.
        weights: Its weights, by their Hugging Face names.
    """
    directory.mkdir(parents=True, exist_ok=True)
    turn_end, end_of_text = (tokenizer.token_to_id(token) for token in (TURN_END, END_OF_TEXT))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": turn_end,
        "pad_token_id": end_of_text,
        **sizes,
    }
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": [turn_end, end_of_text], "pad_token_id": end_of_text},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})


def write(directory: Path, **overrides: Any) -> None:
    """Writes a checkpoint of random weights to `directory`, with `overrides` of its config.json."""
    sizes = {**SIZES, **overrides}
    tokenizer = train_bpe((topics[name] for name in sorted(topics)), sizes["vocab_size"])
    write_checkpoint(directory, sizes, tokenizer, make_weights(sizes))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
