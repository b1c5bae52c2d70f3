"""Settings of `cpd profile`, `cpd profile budget` and `cpd profile split`."""

from pathlib import Path

from pydantic import Field

from cpd.common.settings import ModelSettings, Settings


class ProfileSettings(ModelSettings):
    """Settings for measuring a model on this device."""

    quick: bool = Field(False, description="Measure for one minute instead of four.")
    output: Path = Field(Path("profile.json"), description="File to write the profile to.")
    html_file: Path | None = Field(
        None, description="File to write plots to, as one self-contained page.", json_schema_extra={"flag": "--html"}
    )


class BudgetSettings(ModelSettings):
    """Settings for measuring token budgets."""

    decodes: int = Field(16, ge=1, le=96, description="Number of decoding sequences.")
    context: int = Field(512, ge=1, description="Tokens of each decoding sequence.")
    prompt: int = Field(2048, ge=1, description="Tokens of the prompt that shares their steps.")
    html_file: Path | None = Field(
        None, description="File to write the plot to, as one self-contained page.", json_schema_extra={"flag": "--html"}
    )


class SplitSettings(Settings):
    """Settings for splitting the device between the two lanes."""

    profile: Path = Field(Path("profile.json"), description="Profile written by `cpd profile`.")
    decodes: int = Field(32, ge=1, description="Number of decoding sequences.")
    context: int = Field(1024, ge=1, description="Tokens of each decoding sequence.")
    prompt: int = Field(2048, ge=1, description="Tokens prefilled at the same time.")
    itl_ms: float = Field(
        0.0, ge=0, description="Target for a decode step, in ms; 0 is twice its time alone on the whole device."
    )
    prepared: int = Field(3, ge=1, le=4, description="Number of splits that a worker prepares.")
