"""The settings of the placement policy: the section `policy:` of a YAML file."""

from pydantic import BaseModel, ConfigDict, Field


class PolicySettings(BaseModel):
    """Which policy places requests, and the constants of the predicted costs (`router/placement/costs.py`).

    In YAML, `policy: NAME` is short for `policy: {name: NAME}`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        "cost",
        description="cost, most-cached, round-robin, or module:object: anything that makes a "
        "`router.placement.policy.PlacementPolicy` of these settings.",
    )
    gap_weight: float = Field(
        0.5,
        ge=0,
        le=1e3,
        description="Delay of the first token that is as bad as 1 ms of delay between later tokens of any stream. Less "
        "keeps prompts local, for short TTFTs; more sends them to prefill workers, for even gaps.",
    )
    horizon_tokens: int = Field(64, ge=1, description="Delays of later tokens are counted over this many tokens.")
    expected_output: int = Field(
        256, ge=1, description="Expected tokens of an answer, until the tenant's answers show it."
    )
    handoff_ms: float = Field(
        2.0, ge=0, description="Time that the messages between two workers add to the TTFT, until it has been measured."
    )
    queued_behind: float = Field(
        2.0,
        ge=0,
        description="Number of other prompts that wait for a prefill, until it has been counted.",
    )
    evicted_reuse: float = Field(
        0.25,
        ge=0,
        le=1,
        description="Probability that an evicted page is wanted again, until prompts show how much of them is cached.",
    )
    ttft_miss: float = Field(
        50.0, ge=0, description="Cost of a first token after --slo-ttft, as a multiple of that target."
    )
    itl_miss: float = Field(
        2000.0, ge=0, description="Cost of a stream with gaps over --slo-itl, as a multiple of that target."
    )
    safe_share: float = Field(
        0.8,
        ge=0,
        lt=1,
        description="Predictions up to this part of a target cost nothing. From there the cost of a miss grows "
        "linearly, because predictions are not exact and more streams will come.",
    )
    balanced_share: float = Field(
        1.1,
        ge=1,
        description="A worker may have this multiple of its share of all requests at no cost. Shares are proportional "
        "to decode speed.",
    )
    min_balanced: int = Field(
        2, ge=0, description="Workers with at most this many requests are not balanced: the difference is noise."
    )
    prefix_fetches: bool = Field(
        True, description="Fetch a prefix from another worker's cache where that is predicted to be quicker."
    )
    moves: bool = Field(
        True,
        description="Move running streams away from a worker that is much slower than others, or short of KV pages, "
        "where that is predicted to gain more than it costs.",
    )
    fallback_error: float = Field(
        3.0,
        gt=1,
        description="If more than half of the predicted TTFTs are wrong by more than this factor, requests go as with "
        "`most-cached` until predictions are right again.",
    )
    near_ms: float = Field(1.0, ge=0, description="Options are equally good if their costs differ by less than this,")
    near: float = Field(0.02, ge=0, description="or by less than this part of the TTFT.")
    combined_predicted: int = Field(
        4, ge=1, description="Combined workers predicted in full for a local prefill, and again for a remote one."
    )
    warm_predicted: int = Field(
        2, ge=0, description="Workers with most of the prompt cached that are predicted in full, too."
    )
    prefill_predicted: int = Field(4, ge=1, description="Prefill workers predicted in full; a request tries no others.")
