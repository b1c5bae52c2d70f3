import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_generated_stubs_are_those_of_the_proto_file(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts" / "generate_rpc.py"), str(tmp_path)], check=True)
    made = {file.name: file.read_text() for file in (tmp_path / "cpd" / "rpc").iterdir()}
    assert made
    for name, text in made.items():
        assert text == (ROOT / "cpd" / "rpc" / name).read_text(), f"cpd/rpc/{name} is stale: run `make rpc`"
