"""Default values of the sampling fields."""

from pathlib import Path

from pydantic import ValidationError

from cpd.common.config import SamplingDefaults
from cpd.common.errors import CheckpointError
from router.api.schemas import SAMPLING, GenerateRequest
from router.text.checkpoint import read_json


def default_sampling(model_dir: Path, source: SamplingDefaults) -> dict[str, float]:
    """Returns the sampling fields whose defaults differ from OpenAI's.

    If `source` is "model", they come from the checkpoint's generation_config.json. As in vLLM and SGLang, `do_sample`
    is not read.

    Raises:
        CheckpointError: generation_config.json has a value that a request can't have.
    """
    if source == "openai":
        return {}
    file = model_dir / "generation_config.json"
    config = read_json(file)
    sampling = {name: config[name] for name in SAMPLING if config.get(name) is not None}
    try:
        GenerateRequest.model_validate({"model": "", **sampling})
    except ValidationError as error:
        wrong = error.errors()[0]
        name = str(wrong["loc"][0])
        reason = f"{file}: {name} is {sampling[name]!r}: {wrong['msg']}"
        raise CheckpointError(f"{reason}; correct it, or start with --sampling-defaults openai") from None
    return sampling
