"""The settings of `cpd profile`, `cpd profile budget` and `cpd profile split`."""

from pathlib import Path

from pydantic import Field

from cpd.common.config import ModelSettings, Settings


class ProfileSettings(ModelSettings):
    """Measuring a model on this device."""

    quick: bool = Field(False, description="Spend one minute on measuring instead of four.")
    output: Path = Field(Path("profile.json"), description="The profile to write.")
    html_file: Path | None = Field(
        None, description="Write plots here, one self-contained page.", json_schema_extra={"flag": "--html"}
    )


class BudgetSettings(ModelSettings):
    """The sweep over token budgets."""

    decodes: int = Field(16, ge=1, le=96, description="Sequences that decode meanwhile.")
    context: int = Field(512, ge=1, description="Tokens of each of them.")
    prompt: int = Field(2048, ge=1, description="Tokens of the prompt that is prefilled beside them.")
    html_file: Path | None = Field(
        None, description="Write the plot here, one self-contained page.", json_schema_extra={"flag": "--html"}
    )


class SplitSettings(Settings):
    """The split of the device between the two lanes."""

    profile: Path = Field(Path("profile.json"), description="What `cpd profile` wrote.")
    decodes: int = Field(32, ge=1, description="Sequences that decode.")
    context: int = Field(1024, ge=1, description="Tokens of each of them.")
    prompt: int = Field(2048, ge=1, description="Tokens that are prefilled beside them.")
    itl_ms: float = Field(
        0.0, ge=0, description="Longest decode step wanted; 0 takes twice that of the undisturbed device."
    )
    prepared: int = Field(3, ge=1, le=4, description="Splits that are prepared at start.")
