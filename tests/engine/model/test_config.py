import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpd.common.errors import CheckpointError
from engine.model.config import ExpertsConfig, ModelConfig, RopeConfig, load_config
from tests.checkpoints import FAMILIES
from tests.conftest import MakeCheckpoint

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 2}
MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_key_value_heads": 2}
QWEN3_MOE = {**QWEN2, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
NO_WINDOWS = (None, None)
FULL, SLIDING = ["full_attention"], ["sliding_attention"]


def load(directory: Path, fields: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(fields))
    return load_config(directory)


def test_missing_fields_of_a_llama_config_are_derived(tmp_path: Path) -> None:
    config = load(tmp_path, LLAMA)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert config.page_shape("bfloat16") == (2, 2, 4, 16, 16)
    assert config.page_bytes("bfloat16") == 2 * 2 * 4 * 16 * 16 * 2
    assert not config.qk_norm
    assert not config.tie_embeddings
    assert (config.rope, config.dtype, config.max_model_len) == (RopeConfig(), None, 512)


@pytest.mark.parametrize(
    ("fields", "biases"),
    [
        (LLAMA, (False, False, False)),
        ({**LLAMA, "attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ({**MISTRAL, "attention_bias": True, "sliding_window": None}, (False, False, False)),
        (QWEN2, (True, False, False)),
        (QWEN3, (False, False, False)),
        ({**QWEN3, "attention_bias": True}, (True, True, False)),
    ],
)
def test_each_family_has_the_biases_that_transformers_gives_it(
    tmp_path: Path, fields: dict[str, Any], biases: tuple[bool, bool, bool]
) -> None:
    config = load(tmp_path, fields)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases


def test_head_dim_may_differ_from_hidden_size_over_heads(tmp_path: Path) -> None:
    assert load(tmp_path, {**LLAMA, "head_dim": 24}).head_dim == 24
    assert load(tmp_path, {**LLAMA, "head_dim": None}).head_dim == 16
    assert load(tmp_path, QWEN3).head_dim == 128


def test_the_model_type_follows_from_the_architecture(tmp_path: Path) -> None:
    fields = {name: value for name, value in QWEN3.items() if name != "model_type"}
    assert load(tmp_path, fields).family == "qwen3"


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_is_read_under_its_old_and_its_new_name(tmp_path: Path, name: str) -> None:
    assert load(tmp_path, {**LLAMA, name: "bfloat16"}).dtype == "bfloat16"


def test_rope_is_read_in_the_old_and_the_new_form(tmp_path: Path) -> None:
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
    new = {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    assert load(tmp_path, old).rope == load(tmp_path, new).rope == RopeConfig("linear", 5e5, 2.0)
    assert load(tmp_path, {**LLAMA, "rope_theta": 1e6, "rope_scaling": None}).rope == RopeConfig(theta=1e6)


def test_yarn_extends_the_context(tmp_path: Path) -> None:
    assert load(tmp_path, {**QWEN2, "rope_scaling": YARN}).max_model_len == 2048
    assert load(tmp_path, {**QWEN2, "rope_scaling": YARN, "max_position_embeddings": 2048}).max_model_len == 2048


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({**MISTRAL, "sliding_window": None}, NO_WINDOWS),
        ({**MISTRAL, "sliding_window": 128}, (128, 128)),
        (MISTRAL, (4096, 4096)),
        (MIXTRAL, NO_WINDOWS),
        ({**MIXTRAL, "sliding_window": 128}, (128, 128)),
        (QWEN2, NO_WINDOWS),
        ({**QWEN2, "sliding_window": 128, "use_sliding_window": False}, NO_WINDOWS),
        ({**QWEN2, "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0}, (128, 128)),
        ({**QWEN2, "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}, (None, 128)),
        ({**QWEN2, "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2}, NO_WINDOWS),
        ({**QWEN2, "sliding_window": 0, "max_window_layers": 0}, NO_WINDOWS),
        ({**QWEN3, "sliding_window": 128, "use_sliding_window": True, "layer_types": FULL * 2}, NO_WINDOWS),
        ({**QWEN3, "sliding_window": 9, "use_sliding_window": True, "layer_types": SLIDING * 2}, (9, 9)),
        ({**QWEN3, "sliding_window": 9, "use_sliding_window": True, "layer_types": SLIDING + FULL}, (9, None)),
        ({**QWEN3_MOE, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, (9, 9)),
        ({**QWEN3_MOE, "sliding_window": 9, "max_window_layers": 1}, NO_WINDOWS),
        ({**LLAMA, "sliding_window": 128}, NO_WINDOWS),
    ],
)
def test_the_layers_that_transformers_gives_a_sliding_window_have_one(
    tmp_path: Path, fields: dict[str, Any], windows: tuple[int | None, int | None]
) -> None:
    config = load(tmp_path, fields)
    assert config.windows == windows
    assert config.has_windows == (windows != NO_WINDOWS)


@pytest.mark.parametrize(
    ("fields", "experts"),
    [
        (MIXTRAL, ExpertsConfig(8, 2, 128, normalize=True, layers=(0, 1))),
        ({**MIXTRAL, "num_local_experts": 4, "num_experts_per_tok": 4}, ExpertsConfig(4, 4, 128, True, (0, 1))),
        (QWEN3_MOE, ExpertsConfig(128, 8, 768, normalize=False, layers=(0, 1))),
        (
            {
                **QWEN3_MOE,
                "num_experts": 6,
                "num_experts_per_tok": 6,
                "moe_intermediate_size": 32,
                "norm_topk_prob": True,
                "decoder_sparse_step": 2,
            },
            ExpertsConfig(6, 6, 32, normalize=True, layers=(1,)),
        ),
        ({**QWEN3_MOE, "num_local_experts": 16, "mlp_only_layers": [1]}, ExpertsConfig(16, 8, 768, False, (0,))),
        ({**QWEN3_MOE, "mlp_only_layers": [0, 1]}, None),
        (QWEN3, None),
        ({**LLAMA, "num_experts": 4}, None),
    ],
)
def test_a_mixture_of_experts_is_read(tmp_path: Path, fields: dict[str, Any], experts: ExpertsConfig | None) -> None:
    assert load(tmp_path, fields).experts == experts


def test_mixtral_has_its_own_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, MIXTRAL)
    assert (config.rope.theta, config.norm_eps) == (1e6, 1e-5)


def test_dynamic_scaling_has_no_effect_up_to_the_longest_context_that_is_served(tmp_path: Path) -> None:
    config = load(tmp_path, {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    assert (config.rope, config.max_model_len) == (RopeConfig(), 512)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({**LLAMA, "architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "MambaForCausalLM"),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({**LLAMA, "architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({**LLAMA, "architectures": "Llama"}, "architectures"),
        ({}, "none given"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({**LLAMA, "hidden_act": "gelu"}, "gelu"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({**LLAMA, "hidden_size": None}, "hidden_size"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers"),
        ({**LLAMA, "head_dim": 15}, "head_dim"),
        ({**LLAMA, "rms_norm_eps": "small"}, "rms_norm_eps"),
        ({**LLAMA, "dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({**LLAMA, "rope_scaling": {"rope_type": "dynamic"}}, "factor"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor of RoPE scaling"),
        ({**LLAMA, "rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor 4.0 must be below"),
        ({**LLAMA, "rope_scaling": {**LLAMA3, "factor": "8"}}, "factor must be a positive number"),
        ({**LLAMA, "rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 32}}, "beta_fast 1.0 must not be below"),
        ({**LLAMA, "rope_scaling": {"type": "longrope"}}, "longrope"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, "factor"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({**LLAMA, "rope_theta": 1.0}, "rope_theta"),
        ({**LLAMA, "rope_scaling": "linear"}, "rope_parameters"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**QWEN2, "layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
        ({**QWEN2, "layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ({**QWEN2, "layer_types": 7}, "layer_types"),
        ({**QWEN2, "layer_types": FULL}, "layer_types has 1 entries for 2 layers"),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 0, "sliding_window": 0}, "sliding_window"),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window must be a positive integer, not 0"),
        ({**MISTRAL, "sliding_window": "64"}, "sliding_window"),
        ({**MIXTRAL, "num_local_experts": 0}, "num_local_experts must be a positive integer, not 0"),
        ({**MIXTRAL, "num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok 3 is over"),
        ({**MIXTRAL, "num_local_experts": 2, "num_experts": 3}, "num_experts and num_local_experts differ"),
        ({**MIXTRAL, "num_local_experts": 1 << 30}, "experts in each of 2 layers"),
        ({**QWEN3_MOE, "num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({**QWEN3_MOE, "moe_intermediate_size": None}, "moe_intermediate_size"),
        ({**QWEN3_MOE, "mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ({**QWEN3_MOE, "mlp_only_layers": 1}, "mlp_only_layers"),
        ({**QWEN3_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({**LLAMA, "num_hidden_layers": 1 << 30}, "num_hidden_layers"),
        ({**MISTRAL, "sliding_window": -1}, "sliding_window"),
        ({**QWEN2, "rope_scaling": {**YARN, "factor": float("inf")}}, "factor"),
        ({**QWEN2, "rope_scaling": {**YARN, "original_max_position_embeddings": 10**400}}, "original_max_position"),
    ],
)
def test_unsupported_features_are_refused_by_name(tmp_path: Path, fields: dict[str, Any], names: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, fields)
    message = str(caught.value)
    assert names in message
    assert str(tmp_path / "config.json") in message
    assert "\n" not in message


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '"model"', b"\xff\xfe"])
def test_a_damaged_config_is_refused(tmp_path: Path, content: str | bytes) -> None:
    (tmp_path / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(tmp_path)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_config(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory"):
        load_config(tmp_path / "nowhere")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_files_that_transformers_writes_are_understood(checkpoint: MakeCheckpoint, family: str) -> None:
    config = load_config(checkpoint(family))
    assert family.startswith(config.family)
    assert config.dtype == "float32"
    assert config.rope.kind == ("llama3" if family == "llama3" else "default")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 50) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"])},
    optional=dict.fromkeys(
        (
            "rope_theta",
            "factor",
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
        JSON,
    ),
)
FIELDS = sorted(
    {
        *QWEN3,
        *("head_dim", "sliding_window", "use_sliding_window", "layer_types", "max_window_layers"),
        *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
        *("decoder_sparse_step", "mlp_only_layers"),
    }
)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    base=st.sampled_from([LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE]),
    changes=st.dictionaries(st.sampled_from([*FIELDS, "dtype", "rms_norm_eps", "hidden_act"]), JSON),
    rope=JSON | ROPE,
)
def test_any_file_gives_a_configuration_or_a_checkpoint_error(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], rope: Any
) -> None:
    try:
        config = load(tmp_path, {**base, **changes, "rope_parameters": rope})
    except CheckpointError:
        return
    assert config.num_heads % config.num_kv_heads == 0
    assert config.max_model_len > 0
    assert len(config.windows) == config.num_layers
    assert config.experts is None or 0 < config.experts.per_token <= config.experts.count
