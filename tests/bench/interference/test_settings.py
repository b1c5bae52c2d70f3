import pytest

from bench.interference.settings import InterferenceSettings
from cpd.common.errors import ConfigError


def test_the_grid_begins_with_the_smallest_burst() -> None:
    settings = InterferenceSettings.load({"prefills": "4, 1", "prefill_len": "512,128,512"})
    assert settings.grid() == [(1, 128), (4, 128), (1, 512), (4, 512)]


@pytest.mark.parametrize("text", ["", "1,,2", "0,1", "-3", "many", "1.5"])
def test_a_malformed_list_names_its_setting(text: str) -> None:
    with pytest.raises(ConfigError, match="prefill-len"):
        InterferenceSettings.load({"prefill_len": text}).grid()
