"""What `cpd bench transfer` is told."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field
from pydantic_settings import SettingsConfigDict

from cpd.common.config import Settings


class TransferBenchSettings(Settings):
    """One measurement of a transport."""

    model_config = SettingsConfigDict(env_prefix="CPD_BENCH_TRANSFER_")

    transport: Literal["auto", "nixl", "ucx"] = Field("auto", description="What moves the pages.")
    device: Literal["cpu", "cuda"] = Field(
        "cpu",
        description="Whose memory the pages are in; cuda: this end's first GPU, and the far end's last.",
    )
    pages: list[Annotated[int, Field(ge=1)]] = Field(
        [1, 32, 2048], description="Pages of a push; may be given several times."
    )
    page_size: list[Annotated[ByteSize, Field(ge=1)]] = Field(
        [ByteSize(16 << 10), ByteSize(256 << 10), ByteSize(2304 << 10)],
        description="Of a page, e.g. 256KiB; may be given several times.",
    )
    route: Literal["auto", "network"] = Field(
        "auto", description="network: also between processes of one machine, which nixl has go through memory."
    )
    scatter: Literal["scattered", "neighbours", "both"] = Field(
        "scattered", description="Whether pages lie anywhere in their pools, or side by side."
    )
    repeats: int = Field(9, ge=1, description="Pushes of each kind.")
    pool: ByteSize = Field(
        ByteSize(1 << 30), description="Least size of each side's pool; larger than the caches, or they are measured."
    )
    perftest: bool = Field(True, description="Run ucx_perftest between the pushes, where it is installed.")
    listen: str = Field("", description="HOST:PORT: be the far end for a --connect of another host, and do no more.")
    connect: str = Field("", description="HOST:PORT of the far end; empty starts one on this host.")
    host: str = Field("127.0.0.1", description="This end's address, which the far end must reach; with --connect.")
    profile: Path | None = Field(None, description="Write the cost of a transfer into this profile.")
    json_file: Path | None = Field(None, description="Write all figures here.", json_schema_extra={"flag": "--json"})
    html_file: Path | None = Field(
        None, description="Write a page with charts here.", json_schema_extra={"flag": "--html"}
    )
