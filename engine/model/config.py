"""Shape of a model, read from the `config.json` of a Hugging Face checkpoint.

Every reason to refuse a checkpoint that shows without its weights is found here.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cpd.common.blocks import BLOCK_SIZE
from cpd.common.errors import CheckpointError

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: Mapping[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

_TOO_LARGE = 1 << 40
"""A config.json with a number this large is damaged."""


@dataclass(frozen=True, slots=True)
class _Family:
    """What follows from model_type, and transformers' defaults for fields that older files leave out."""

    architecture: str
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    window: Literal["none", "all layers", "some layers"] = "some layers"
    always_qkv_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(
        "LlamaForCausalLM", max_position_embeddings=2048, window="none", attention_bias=True, mlp_bias=True
    ),
    "mistral": _Family("MistralForCausalLM", num_kv_heads=8, max_position_embeddings=131072, window="all layers"),
    "qwen2": _Family("Qwen2ForCausalLM", num_kv_heads=32, always_qkv_bias=True),
    "qwen3": _Family("Qwen3ForCausalLM", num_kv_heads=32, head_dim=128, attention_bias=True, qk_norm=True),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Fields beyond `factor` belong to the kind that reads them.

    Attributes:
        kind: How frequencies are scaled.
        theta: Base of the frequencies.
        factor: Extended context length / original context length.
        original_max_position: Original context length.
        low_freq_factor, high_freq_factor: Llama 3: bounds of the wavelengths that are interpolated.
        beta_fast, beta_slow: YaRN: the same bounds, as rotations over the original context.
        truncate: YaRN: True if the bounds are rounded to whole dimensions.
        attention_factor: Factor of the cosines and sines.
    """

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder of the Llama family.

    Attributes:
        family: llama, mistral, qwen2 or qwen3.
        qkv_bias, o_bias, mlp_bias: True if these linear layers have a bias.
        qk_norm: True if queries and keys are normalised per head.
        tie_embeddings: True if the LM head shares the embedding's weight.
        sliding_window: Tokens that attention reaches back; None for all.
        max_model_len: Longest prompt plus output, in tokens: the checkpoint's limit, or a shorter one that is served.
        dtype: The checkpoint's own type; None if config.json does not give one.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    sliding_window: int | None
    max_model_len: int
    dtype: Dtype | None

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """[layers, keys and values, key-value heads, tokens, head size]"""
        return self.num_layers, 2, self.num_kv_heads, BLOCK_SIZE, self.head_dim

    def page_bytes(self, kv_dtype: Dtype) -> int:
        """Bytes of one page of the KV pool."""
        return math.prod(self.page_shape) * DTYPE_BYTES[kv_dtype]


def load_config(model_dir: Path) -> ModelConfig:
    """Reads `config.json` of a checkpoint directory.

    Raises:
        CheckpointError: The file is missing or malformed, or the model is not supported.
    """
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir} is not a directory; give the directory of a Hugging Face checkpoint")
    path = model_dir / "config.json"
    if not path.exists():
        raise CheckpointError(f"{path} is missing; give the directory of a Hugging Face checkpoint")
    return _Reader(path, read_json(path)).model()


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file of a checkpoint.

    Raises:
        CheckpointError: The file cannot be read or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold one JSON object")
    return data


class _Reader:
    """Typed access to the fields of one config.json."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        self._path = path
        self._fields = fields

    def model(self) -> ModelConfig:
        fields = self._fields
        model_type, family = self._family()
        if quantization := fields.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else None
            raise self._error(
                f"the weights are quantized ({method or 'quantization_config'})", "use the original weights"
            )
        if (activation := fields.get("hidden_act", "silu")) != "silu":
            raise self._error(f"hidden_act {activation!r} is not supported", "only silu is")
        hidden_size = self._int("hidden_size")
        num_heads = self._int("num_attention_heads")
        num_kv_heads = self._int("num_key_value_heads", family.num_kv_heads or num_heads, null=num_heads)
        if num_heads % num_kv_heads:
            raise self._error(
                f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        derived = hidden_size // num_heads
        head_dim = self._int("head_dim", family.head_dim or derived, null=derived)
        if head_dim % 2:
            raise self._error(f"head_dim {head_dim} is odd", "rotary embedding needs an even one")
        max_position = self._int("max_position_embeddings", family.max_position_embeddings)
        rope = self._rope(max_position)
        # A file edited to switch YaRN on still has its old max_position_embeddings.
        extended = int(rope.original_max_position * rope.factor) if rope.kind == "yarn" else 0
        attention_bias = family.attention_bias and bool(fields.get("attention_bias", False))
        return ModelConfig(
            family=model_type,
            vocab_size=self._int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self._int("intermediate_size"),
            num_layers=self._int("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=self._float(fields, "rms_norm_eps", 1e-6),
            rope=rope,
            qkv_bias=family.always_qkv_bias or attention_bias,
            o_bias=attention_bias,
            mlp_bias=family.mlp_bias and bool(fields.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
            sliding_window=self._sliding_window(family),
            max_model_len=max(max_position, extended),
            dtype=self._dtype(),
        )

    def _family(self) -> tuple[str, _Family]:
        supported = ", ".join(family.architecture for family in _FAMILIES.values())
        architectures = self._list("architectures") or []
        by_architecture = {family.architecture: name for name, family in _FAMILIES.items()}
        model_type = self._fields.get("model_type") or next(
            (by_architecture[name] for name in architectures if name in by_architecture), None
        )
        family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if family is None or (architectures and family.architecture not in architectures):
            named = ", ".join(architectures) or model_type or "none given"
            raise self._error(f"architecture {named} is not supported", f"supported are {supported}")
        return str(model_type), family

    def _sliding_window(self, family: _Family) -> int | None:
        fields = self._fields
        window = fields.get("sliding_window", 4096)
        if family.window == "none":
            return None
        if family.window == "some layers":
            window = window if fields.get("use_sliding_window", False) else None
            kinds = self._list("layer_types")
            if kinds is None:
                slides = window is not None and self._int("max_window_layers", 28) < self._int("num_hidden_layers")
                kinds = ["sliding_attention"] if slides else []
            if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
                raise self._error(f"layer_types contains {sorted(unknown)[0]!r}, which is not supported")
            if "sliding_attention" not in kinds:
                return None
            if window is None:
                raise self._error("layer_types contains 'sliding_attention', but no sliding window is in use")
        return None if window is None else self._positive("sliding_window", window)

    def _rope(self, max_position: int) -> RopeConfig:
        # transformers 5 writes everything into rope_parameters; older files have rope_theta and rope_scaling.
        fields = self._fields
        scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
        if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
            raise self._error("rope_parameters must be one set of values for all layers")
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        theta = self._float(scaling, "rope_theta", self._float(fields, "rope_theta", 10_000.0))
        if theta <= 1:
            raise self._error(f"rope_theta must be over 1, not {theta}")
        partial = scaling.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise self._error(f"partial_rotary_factor {partial} is not supported")
        if kind == "default":
            return RopeConfig(theta=theta)
        if kind == "linear":
            return RopeConfig("linear", theta, self._float(scaling, "factor"))
        # The top-level field wins in transformers, too.
        name = "original_max_position_embeddings"
        original = self._positive(name, fields.get(name) or scaling.get(name) or max_position)
        if kind == "llama3":
            return RopeConfig(
                "llama3",
                theta,
                self._float(scaling, "factor"),
                original,
                low_freq_factor=self._float(scaling, "low_freq_factor"),
                high_freq_factor=self._float(scaling, "high_freq_factor"),
            )
        if kind == "yarn":
            factor = self._float(scaling, "factor", max_position / original)
            return RopeConfig(
                "yarn",
                theta,
                factor,
                original,
                beta_fast=self._float(scaling, "beta_fast", 32.0),
                beta_slow=self._float(scaling, "beta_slow", 1.0),
                truncate=bool(scaling.get("truncate", True)),
                attention_factor=self._yarn_attention_factor(scaling, factor),
            )
        raise self._error(f"RoPE scaling {kind!r} is not supported", "supported are default, linear, llama3 and yarn")

    def _yarn_attention_factor(self, scaling: dict[str, Any], factor: float) -> float:
        default = _yarn_mscale(factor, 1.0)
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            mscale, all_dim = self._float(scaling, "mscale"), self._float(scaling, "mscale_all_dim")
            default = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, all_dim)
        return self._float(scaling, "attention_factor", default)

    def _dtype(self) -> Dtype | None:
        name = self._fields.get("dtype") or self._fields.get("torch_dtype")
        if name is None:
            return None
        name = str(name).removeprefix("torch.")
        for dtype in DTYPE_BYTES:
            if name == dtype:
                return dtype
        raise self._error(f"dtype {name} is not supported", f"supported are {', '.join(DTYPE_BYTES)}")

    def _list(self, name: str) -> list[str] | None:
        value = self._fields.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise self._error(f"{name} must be a list of names, not {value!r}")
        return value

    def _int(self, name: str, default: int | None = None, *, null: int | None = None) -> int:
        value = self._fields.get(name, default)
        if value is None:
            value = null
        if value is None:
            raise self._error(f"{name} is missing")
        return self._positive(name, value)

    def _positive(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _TOO_LARGE:
            raise self._error(f"{name} must be a positive integer, not {value!r}")
        return value

    def _float(self, fields: dict[str, Any], name: str, default: float | None = None) -> float:
        value = fields.get(name)
        if value is None:
            value = default
        if value is None:
            raise self._error(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _TOO_LARGE:
            raise self._error(f"{name} must be a positive number, not {value!r}")
        return float(value)

    def _error(self, problem: str, advice: str = "") -> CheckpointError:
        return CheckpointError(f"{self._path}: {problem}" + (f"; {advice}" if advice else ""))


def _yarn_mscale(scale: float, mscale: float) -> float:
    """Factor by which YaRN scales queries and keys (https://arxiv.org/abs/2309.00071, section 3.4)."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0
