"""`thresher init`: writes a file to start from, either a training of your own or a new selection method."""

import keyword
import re
import shlex
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

METHODS_FOLDER = Path("src/thresher/methods")
REGISTRY = METHODS_FOLDER / "built_in.py"
REFERENCE_TESTS = Path("tests/reference")
STAGE_NAMES = ("before", "epoch", "batch")
NEXT_COMMAND = "thresher advise {} --budget 0.5"
"""Command that follows on a new training file."""
NEXT_STEPS = """
Next (CONTRIBUTING.md explains each step):
  1. Write the method in {method}.
  2. Write the paper's pseudo-code in {test}, which fails until then.
  3. Run `make cards`, which writes docs/methods/{name}.md and the index.
  4. Run `make test` and `make check`.
  5. Run `thresher league {name}`, which compares it with other methods. Another change of the file trains anew.
  6. Add a line to CHANGELOG.md."""


def init(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE | method",
            help="Path of the training file to write. The word `method`, followed by a name, starts a new selection method "
            "instead, in a checkout of this repository.",
        ),
    ] = "my_training.py",
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Name of the new method, such as `big_loss`. Only after `method`."
        ),
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE",
            help="Stage at which the new method decides: `before` training, each `epoch` (default) or each `batch`.",
        ),
    ] = None,
) -> None:
    """Write a commented file to start from; existing files are never overwritten.

    `thresher init FILE` writes a training of your own. `thresher advise FILE:build --budget 0.5` then shows how much time
    selection could save, and `thresher compare` measures the methods. `thresher init method NAME` writes a new selection
    method: its file, its line in the registry and its reference test.
    """
    if target == "method":
        _init_method(name, stage or "epoch")
    elif name is not None or stage is not None:
        raise ValueError(
            f"a name and --stage belong to a new method: `thresher init method NAME`, got {target!r} before them"
        )
    else:
        _init_training(Path(target))


def _init_training(path: Path) -> None:
    template = files("thresher_lab").joinpath("tasks", "template.py").read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(template.replace("{path}", path.name))
    except FileExistsError:
        raise ValueError(f"{path} is there already; give another name") from None
    typer.echo(f"{path}\n{NEXT_COMMAND.format(shlex.quote(f'{path}:build'))}")


def _init_method(name: str | None, stage: str) -> None:
    if name is None:
        raise ValueError(
            "a new method needs a name: `thresher init method NAME`, such as `thresher init method big_loss`"
        )
    if stage not in STAGE_NAMES:
        raise ValueError(f"--stage must be one of {', '.join(STAGE_NAMES)}, got {stage!r}")
    kind = _class_name(name)
    root = _checkout()
    written = {
        METHODS_FOLDER / f"{name}.py": f"{stage}.py.txt",
        REFERENCE_TESTS / f"test_{name}.py": f"{stage}_test.py.txt",
    }
    for path in written:
        if (root / path).exists():
            raise ValueError(f"{path} is there already; choose another name, or delete the file")
    templates = files("thresher_lab.cli").joinpath("new_method")
    for path, template in written.items():
        text = Template(templates.joinpath(template).read_text(encoding="utf-8"))
        (root / path).write_text(text.substitute({"name": name, "Class": kind}), encoding="utf-8")
        typer.echo(path.as_posix())
    _register(root / REGISTRY, f"from thresher.methods.{name} import {kind} as {kind}\n")
    typer.echo(f"{REGISTRY.as_posix()} (one line)")
    method, test = (path.as_posix() for path in written)
    typer.echo(NEXT_STEPS.format(method=method, test=test, name=name))


def _class_name(name: str) -> str:
    """Returns the name of the class of a new method, after checking that both names are free."""
    import thresher

    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ValueError(
            f"{name!r} cannot be the name of a method: write lower-case words joined by underscores, such as big_loss, that "
            "are no keyword of Python"
        )
    kind = "".join(word.capitalize() for word in name.split("_"))
    in_use = {name, kind} & {*thresher.methods.names(), *thresher.__all__}
    if in_use:
        raise ValueError(
            f"thresher has {' and '.join(sorted(in_use))} already; choose another name than {name!r}"
        )
    return kind


def _checkout() -> Path:
    """Returns the root of the checkout of this repository in which the command runs."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / REGISTRY).is_file() and (folder / REFERENCE_TESTS).is_dir():
            return folder
    raise ValueError(
        f"{here} is not in a checkout of thresher: neither it nor a folder above it has {REGISTRY.as_posix()}. Clone the "
        "repository and run the command there. A method in a package of your own needs no checkout: name its class in the "
        "entry-point group `thresher.methods` of that package"
    )


def _register(path: Path, line: str) -> None:
    """Inserts one line into the registry, whose lines stay sorted."""
    head, *lines = re.split(r"(?m)^(?=from )", path.read_text(encoding="utf-8"))
    path.write_text(head + "".join(sorted([*lines, line])), encoding="utf-8")
