import re
from pathlib import Path

from cpd.common.policy_settings import PolicySettings
from cpd.common.settings import ClusterSettings

ROOT = Path(__file__).resolve().parents[2]


def test_every_setting_is_documented_and_no_other() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    documented = re.findall(r"^\| `--([a-z-]+)` \|", text, re.MULTILINE)
    assert sorted(documented) == sorted(name.replace("_", "-") for name in ClusterSettings.model_fields)


def test_every_constant_of_the_policy_is_documented() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    for name, field in PolicySettings.model_fields.items():
        if name != "name":
            default = "on" if field.default is True else f"{field.default:g}"
            assert f"| `{name.replace('_', '-')}` | {default} | {field.description} |" in text


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
