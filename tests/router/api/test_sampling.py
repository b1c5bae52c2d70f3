import json
from pathlib import Path
from typing import Any

import pytest

from cpd.common.errors import CheckpointError
from router.api.sampling import default_sampling


def _write(directory: Path, **fields: Any) -> None:
    (directory / "generation_config.json").write_text(json.dumps(fields))


def test_the_defaults_are_those_of_the_models_generation_config(tmp_path: Path) -> None:
    assert default_sampling(tmp_path, "model") == {}
    said = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "presence_penalty": 1.5}
    _write(tmp_path, do_sample=True, max_new_tokens=2048, **said)
    del said["min_p"]
    assert default_sampling(tmp_path, "model") == said
    assert default_sampling(tmp_path, "openai") == {}


def test_defaults_that_are_invalid_in_a_request_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, top_p=0.9, temperature=20)
    with pytest.raises(CheckpointError, match=r"temperature is 20: .* 2; .* --sampling-defaults openai"):
        default_sampling(tmp_path, "model")
    assert default_sampling(tmp_path, "openai") == {}
