"""Writes GGUF files of small checkpoints with the package `gguf`, as llama.cpp's converter would."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Types
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

_ARCHITECTURES = {"llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
_NAMES = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers", "blk"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.o_proj", "attn_output"),
    *((f"self_attn.{part}_proj", f"attn_{part}") for part in "qkv"),
    *((f"self_attn.{part}_norm", f"attn_{part}_norm") for part in "qk"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.gate.", "ffn_gate_inp."),
    *((f"mlp.{part}_proj", f"ffn_{part}") for part in ("gate", "up", "down")),
]
_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_EXPERT_NAMES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def own_name(name: str) -> str:
    """Converts the Hugging Face name of a tensor outside the experts."""
    for theirs, ours in _NAMES:
        name = name.replace(theirs, ours)
    return name


def random_blocks(shape: tuple[int, ...], kind: Types, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Makes blocks of a type that the package can't quantise to; the weights are as large as those of a new model."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(256, size=(*shape[:-1], shape[-1] // elements, size), dtype=np.uint8)
    scale = np.float16(shape[-1] ** -0.5 / {Types.Q4_K: 200.0, Types.Q6_K: 1200.0}[kind])
    if kind == Types.Q4_K:
        blocks[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
        blocks[..., 2:4] = np.frombuffer(np.float16(7.5 * scale).tobytes(), np.uint8)
    else:
        blocks[..., -2:] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(directory: Path, path: Path, types: Mapping[str, Types], **fields: Any) -> dict[str, torch.Tensor]:
    """Writes a file of a checkpoint.

    Args:
        directory: Has the checkpoint.
        path: The file to write.
        types: Type of a matrix by a part of its name in the file, after a space; that of "" for the others. One whose
            rows are no whole blocks gets Q8_0.
        fields: Metadata to replace; None to leave one out.

    Returns:
        The checkpoint's tensors as the file has them, dequantised.
    """
    config = json.loads((directory / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    arch = _ARCHITECTURES[config["model_type"]]
    writer, rng = gguf.GGUFWriter(path, arch), np.random.default_rng(0)
    for name, value in {**_metadata(config), **_tokens(directory, config), **fields}.items():
        if value is not None:
            writer.add_key_value(name.replace("ARCH", arch), value, _type_of(value))
    result: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, str]] = {}  # names of the experts in each tensor of the file

    def order_of(name: str, rows: int) -> torch.Tensor:
        """Rows as the converter orders them: the two that rotate together side by side."""
        of_heads = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
        if arch != "llama" or of_heads is None:
            return torch.arange(rows)
        return torch.arange(rows).view(of_heads, 2, rows // of_heads // 2).transpose(1, 2).flatten()

    def add(own: str, tensor: torch.Tensor) -> torch.Tensor:
        kind = next(kind for part, kind in types.items() if part in f" {own}")
        if tensor.dim() == 1 or "gate_inp" in own:
            kind = Types.F32
        elif tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = Types.Q8_0
        if kind in (Types.Q4_K, Types.Q6_K):
            data = random_blocks(tuple(tensor.shape), kind, rng)
        else:
            data = quantize(tensor.numpy(), kind)
        writer.add_tensor(own, data, raw_dtype=kind)
        return torch.from_numpy(dequantize(data, kind)).view(tensor.shape)

    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            layer, number, part = match.groups()
            experts.setdefault(f"blk.{layer}.ffn_{_EXPERT_NAMES[part]}_exps.weight", {})[int(number)] = name
            continue
        order = order_of(name, len(tensor))
        written = add(own_name(name), tensor.float()[order])
        result[name] = torch.empty_like(written)
        result[name][order] = written
    for own, names in experts.items():
        ordered = [names[number] for number in sorted(names)]
        written = add(own, torch.stack([tensors[name].float() for name in ordered]))
        result |= {name: one.clone() for name, one in zip(ordered, written, strict=True)}
    if (divisors := _divisors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return result


def _divisors(config: Mapping[str, Any]) -> npt.NDArray[np.float32] | None:
    """What Llama's converter makes of RoPE scaling."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    divisors: npt.NDArray[np.float32] = (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
    return divisors


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    return {
        "ARCH.embedding_length": config["hidden_size"],
        "ARCH.feed_forward_length": config["intermediate_size"],
        "ARCH.block_count": config["num_hidden_layers"],
        "ARCH.attention.head_count": config["num_attention_heads"],
        "ARCH.attention.head_count_kv": config["num_key_value_heads"],
        "ARCH.attention.key_length": config.get("head_dim"),
        "ARCH.context_length": config["max_position_embeddings"],
        "ARCH.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "ARCH.rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
        "ARCH.expert_count": config.get("num_local_experts") or config.get("num_experts"),
        "ARCH.expert_used_count": config.get("num_experts_per_tok"),
        "ARCH.expert_feed_forward_length": config.get("moe_intermediate_size"),
    }


def _tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    model = json.loads((directory / "tokenizer.json").read_text())
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    vocabulary = {number: token for token, number in model["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in model["added_tokens"]}
    vocabulary |= special
    size = config["vocab_size"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [vocabulary.get(number, f"<unused{number}>") for number in range(size)],
        "tokenizer.ggml.token_type": [
            int(gguf.TokenType.CONTROL if number in special else gguf.TokenType.NORMAL if number in vocabulary else 5)
            for number in range(size)
        ],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": settings["chat_template"],
    }


def _type_of(value: Any) -> gguf.GGUFValueType:
    if isinstance(value, bool):
        return gguf.GGUFValueType.BOOL
    if isinstance(value, int):
        return gguf.GGUFValueType.UINT32
    return gguf.GGUFValueType.get_type(value)
