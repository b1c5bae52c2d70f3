"""Profile files and their predictions."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.common.errors import ConfigError
from cpd.performance.model import PerfModel, Profile, ShareProfile, StepCost, TransferProfile, Work

COUNTS = st.integers(0, 20_000)


def cost(of: float, **changes: Any) -> StepCost:
    fields = {
        "tokens": (1, 100, 1100),
        "tokens_ms": (4 / of, 4 / of, 104 / of),
        "seq_ms": 0.01,
        "context_ms": 1e-5,
        "pair_ms": 1e-6,
    }
    return StepCost(**(fields | changes))


def share(of: float, **changes: Any) -> ShareProfile:
    return ShareProfile(share=of, decode=cost(of, **changes), prefill=cost(of, **changes))


def profile(*shares: ShareProfile) -> Profile:
    return Profile(source="roofline", device="H200", model="Qwen3-8B bf16", shares=shares or (share(1),))


def test_an_instant_device_takes_no_time() -> None:
    model = PerfModel(Profile.load("instant"))
    assert model.step_ms(Work.decode(100, 100_000) + Work.prefill(10_000)) == 0
    assert model.transfer_ms(10**12) == pytest.approx(0)


def test_work_of_a_prefill_does_not_depend_on_its_chunks() -> None:
    whole = Work.prefill(1000, before=200)
    chunks = [Work.prefill(count, before) for count, before in ((300, 200), (1, 500), (699, 501))]
    assert sum(chunk.tokens for chunk in chunks) == whole.tokens
    assert sum(chunk.pairs for chunk in chunks) == whole.pairs
    assert chunks[-1].context == whole.context == 1200


def test_a_decode_is_a_chunk_of_one_token() -> None:
    assert Work.decode(1, 500) == Work.prefill(1, before=499)
    assert Work.decode(3, 900) == Work.prefill(1, 99) + Work.prefill(1, 299) + Work.prefill(1, 499)
    assert Work.decode(3, 900).is_decode
    assert not (Work.decode(3, 900) + Work.prefill(2)).is_decode


def test_time_follows_the_curve_and_continues_beyond_its_end() -> None:
    model = PerfModel(profile(share(1, seq_ms=0, context_ms=0, pair_ms=0)))
    times = [model.step_ms(Work.prefill(tokens)) for tokens in (1, 50, 100, 600, 1100, 2100)]
    assert times == pytest.approx([4, 4, 4, 54, 104, 204])
    assert model.step_ms(Work()) == 0


def test_the_parts_of_a_step_add_up() -> None:
    model = PerfModel(profile())
    expected = 4 + 0.01 * 8 + 1e-5 * 8000 + 1e-6 * 8000
    assert model.step_ms(Work.decode(8, 8000)) == pytest.approx(expected)
    step = Work.decode(8, 8000) + Work.prefill(92, 408)
    assert model.step_ms(step) == pytest.approx(4 + 0.01 * 9 + 1e-5 * 8500 + 1e-6 * (8000 + 92 * 408 + 92 * 93 / 2))


def test_decodes_have_their_own_coefficients() -> None:
    both = ShareProfile(share=1, decode=cost(1, tokens_ms=(2, 2, 52)), prefill=cost(1))
    model, decode = PerfModel(profile(both)), Work.decode(8, 8000)
    assert model.step_ms(decode) == pytest.approx(PerfModel(profile()).step_ms(decode) - 2)
    mixed = decode + Work.prefill(100)
    assert model.step_ms(mixed) == PerfModel(profile()).step_ms(mixed)


def test_a_curve_of_one_knot_is_flat() -> None:
    model = PerfModel(profile(share(1, tokens=(1,), tokens_ms=(5.0,), pair_ms=0, context_ms=0, seq_ms=0)))
    assert model.step_ms(Work.prefill(1)) == model.step_ms(Work.prefill(1000)) == 5


def test_between_two_shares_time_is_linear_in_the_inverse() -> None:
    model = PerfModel(profile(share(0.25), share(0.5), share(1)))
    decode, prefill = Work.decode(1, 0), Work.prefill(1100)
    for of in (0.25, 0.5, 1, 0.3, 0.7, 0.125):  # these work by 1 / share, also below the least measured one
        assert model.step_ms(decode, of) == pytest.approx(0.01 + 4 / of)
        assert model.step_ms(prefill, of) == pytest.approx(model.step_ms(prefill) + 104 / of - 104)
    flat = PerfModel(profile(share(0.25, tokens_ms=(4, 4, 104)), share(1)))
    assert flat.step_ms(decode, 0.4) == pytest.approx(flat.step_ms(decode))


def test_time_scales_if_only_the_whole_device_was_measured() -> None:
    model = PerfModel(profile(share(1)))
    assert model.step_ms(Work.prefill(512), 0.5) == pytest.approx(2 * model.step_ms(Work.prefill(512)))


def test_a_busy_other_lane_slows_steps_down() -> None:
    half = ShareProfile(share=0.5, decode=cost(0.5, slowdown=1.2), prefill=cost(0.5, slowdown=1.5))
    model = PerfModel(profile(half, share(1)))
    decode, prefill = Work.decode(8, 8000), Work.prefill(512)
    assert model.step_ms(decode, 0.5, prefill) == pytest.approx(1.2 * model.step_ms(decode, 0.5))
    assert model.step_ms(prefill, 0.5, decode) == pytest.approx(1.5 * model.step_ms(prefill, 0.5))
    assert model.step_ms(decode, 0.5, Work()) == model.step_ms(decode, 0.5)


@given(COUNTS, COUNTS, st.integers(1, 500), st.floats(0.05, 1))
def test_more_work_takes_no_less_time(tokens: int, before: int, seqs: int, of: float) -> None:
    model = PerfModel(profile(share(0.3, seq_ms=0.02), share(0.6), share(1)))
    chunk, decode = Work.prefill(tokens + 1, before), Work.decode(seqs, seqs * (before + 1))
    for part in (chunk, decode):
        assert 0 < model.step_ms(part, of) <= model.step_ms(chunk + decode, of)
    assert model.step_ms(chunk, of) <= model.step_ms(Work.prefill(tokens + 2, before), of)


def test_a_transfer_takes_a_fixed_time_and_a_time_per_byte() -> None:
    model = PerfModel(profile().model_copy(update={"transfer": TransferProfile(fixed_ms=2, bytes_per_ms=1e6)}))
    assert model.transfer_ms(0) == 2
    assert model.transfer_ms(5_000_000) == pytest.approx(7)


def test_a_profile_survives_saving_and_loading(tmp_path: Path) -> None:
    written = profile(share(0.5), share(1))
    written.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == written
    fields = json.loads((tmp_path / "profile.json").read_text())
    assert (fields["schema"], fields["source"]) == ("cpd-profile/1", "roofline")


def damaged(**changes: Any) -> dict[str, Any]:
    whole = share(1).model_dump()
    return whole | {"decode": whole["decode"] | changes}


def test_unknown_fields_of_a_newer_version_are_ignored() -> None:
    document = profile().model_dump(mode="json", by_alias=True)
    document["new"] = document["transfer"]["new"] = document["shares"][0]["decode"]["new"] = {"a": 1}
    assert Profile.model_validate_json(json.dumps(document)) == profile()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "cpd-profile/9"}, "schema"),
        ({"source": "guessed"}, "source"),
        ({"shares": []}, "shares"),
        ({"shares": [share(0.5).model_dump()]}, "the last one must be 1"),
        ({"shares": [share(1).model_dump(), share(0.5).model_dump()]}, "must ascend"),
        ({"shares": [damaged(tokens=[1, 5])]}, "2 knots, but 3 times"),
        ({"shares": [damaged(tokens=[2, 5, 9])]}, "begin with 1"),
        ({"shares": [damaged(tokens=[1, 5, 5])]}, "ascend"),
        ({"shares": [damaged(tokens_ms=[3, 2, 5])]}, "must not fall"),
        ({"shares": [damaged(pair_ms=-1)]}, "shares.0.decode.pair_ms"),
        ({"shares": [share(1).model_dump() | {"share": 1.5}]}, "shares.0.share"),
    ],
)
def test_a_damaged_profile_is_refused_in_one_sentence(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile().model_dump(by_alias=True) | changes))
    with pytest.raises(ConfigError) as raised:
        Profile.load(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"shares": NaN}'])
def test_a_file_without_a_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a profile"):
        Profile.load(path)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no profile"):
        Profile.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot write the profile"):
        profile().save(tmp_path / "none" / "profile.json")


def test_no_torch_is_needed() -> None:
    code = "import sys, cpd.performance.model, cpd.performance.fit; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
