"""Writes a checkpoint of random weights, of any size: `python -m models.tiny.make DIR`. For benchmarks and tests.

A Qwen3 model whose answers are noise, with a byte-level BPE tokenizer of its own, trained on the texts of `help()` that
come with Python. Seeded: the same versions of Python and tokenizers write the same bytes.
"""

import json
import sys
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
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of `vocab_size` tokens, the special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(name, special=True) for name in (END_OF_TEXT, TURN_START, TURN_END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    return tokenizer


def make_config(eos: int, pad: int) -> dict[str, Any]:
    """config.json of a model with 0.7 million parameters."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }


def make_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
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


def write(directory: Path, **overrides: Any) -> None:
    """Writes the whole checkpoint to `directory`, with `overrides` of its config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(overrides.get("vocab_size", VOCAB_SIZE))
    ids = tokenizer.get_vocab()
    end_of_text, turn_end = ids[END_OF_TEXT], ids[TURN_END]
    config = make_config(eos=turn_end, pad=end_of_text) | overrides
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
    save_file(make_weights(config), str(directory / "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    write(Path(sys.argv[1]))
