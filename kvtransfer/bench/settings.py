"""Settings of `cpd bench transfer`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field
from pydantic_settings import SettingsConfigDict

from cpd.common.settings import Settings


class TransferBenchSettings(Settings):
    """One measurement of a transport."""

    model_config = SettingsConfigDict(env_prefix="CPD_BENCH_TRANSFER_")

    transport: Literal["auto", "nixl", "ucx"] = Field("auto", description="Transport that moves the pages.")
    receiver_transport: Literal["", "auto", "nixl", "ucx"] = Field(
        "", description="Transport of the receiver; empty: the same as the sender's."
    )
    device: Literal["cpu", "cuda"] = Field(
        "cpu",
        description="Memory of the pages; cuda: the sender's first GPU and the receiver's last.",
    )
    pages: list[Annotated[int, Field(ge=1)]] = Field(
        [1, 32, 2048], description="Pages per push; may be given several times."
    )
    page_size: list[Annotated[ByteSize, Field(ge=1)]] = Field(
        [ByteSize(16 << 10), ByteSize(256 << 10), ByteSize(2304 << 10)],
        description="Page size, e.g. 256KiB; may be given several times.",
    )
    route: Literal["auto", "network"] = Field(
        "auto", description="network: nixl uses the network back end even between processes of one machine."
    )
    scatter: Literal["scattered", "contiguous", "both"] = Field(
        "scattered", description="Scattered or contiguous pages of both pools, or both kinds."
    )
    repeats: int = Field(9, ge=1, description="Pushes of each kind.")
    pool: ByteSize = Field(
        ByteSize(1 << 30), description="Least size of each side's pool; smaller than the CPU caches, it measures them."
    )
    perftest: bool = Field(True, description="Run ucx_perftest between the pushes, if it is installed.")
    listen: str = Field("", description="HOST:PORT: only be the receiver for a --connect from another host.")
    connect: str = Field("", description="HOST:PORT of the receiver; empty starts one on this host.")
    host: str = Field("127.0.0.1", description="The sender's address, which the receiver must reach; with --connect.")
    profile: Path | None = Field(None, description="Write the cost of a transfer into this profile.")
    json_file: Path | None = Field(None, description="Write all figures here.", json_schema_extra={"flag": "--json"})
    html_file: Path | None = Field(
        None, description="Write a page with charts here.", json_schema_extra={"flag": "--html"}
    )
