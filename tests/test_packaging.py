"""What is built and installed: the wheel carries conf/, light parts import no torch, `make` sets up once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import routing_lab

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = ("torch", "torchvision", "timm", "lightning", "transformers", "torchmetrics")


def run(command: Sequence[str | Path], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command without any of make's own variables."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "VENV")}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=inherited | environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    result = run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT], out)
    assert result.returncode == 0, result.stdout + result.stderr
    return out


def test_wheel_carries_the_package_and_every_config_file(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = {path.relative_to(ROOT / "conf").as_posix() for path in (ROOT / "conf").rglob("*.yaml")}
    assert tracked
    assert {f"routing_lab/conf/{name}" for name in tracked} <= names
    assert "routing_lab/py.typed" in names
    assert all(name.startswith(("routing_lab/", "routing_lab-")) for name in names)


def test_source_archive_can_be_built_from(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        names = {name.split("/", 1)[1] for name in content.getnames()}
    assert {"pyproject.toml", "README.md", "Makefile", "conf/train.yaml"} <= names


def test_an_installed_package_finds_its_configs_from_anywhere(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    site = tmp_path / "site"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    where = "import routing_lab.config; print(routing_lab.config.conf_path())"
    found = run([sys.executable, "-c", where], elsewhere, PYTHONPATH=str(site))
    assert Path(found.stdout.strip()) == site / "routing_lab" / "conf", found.stderr
    for entry in (["-m", "routing_lab.train"], ["-c", "from routing_lab.cli import main; main()", "train"]):
        shown = run([sys.executable, *entry, "router=amod", "--cfg", "job"], elsewhere, PYTHONPATH=str(site))
        assert shown.returncode == 0, shown.stderr
        assert "router:\n" in shown.stdout
    assert list(elsewhere.iterdir()) == []


def test_installed_version_and_console_script() -> None:
    assert metadata.version("routing_lab") == routing_lab.__version__
    (script,) = metadata.entry_points(group="console_scripts", name="routing-lab")
    assert callable(script.load())


def test_torch_and_torchvision_have_lower_bounds_only() -> None:
    requirements = {item.name: item for item in map(Requirement, PROJECT["project"]["dependencies"])}
    for name in ("torch", "torchvision"):
        assert [bound.operator for bound in requirements[name].specifier] == [">="]


@pytest.mark.parametrize(
    "module", ["routing_lab", "routing_lab.config", "routing_lab.evidence", "routing_lab.cost.macs"]
)
def test_light_parts_import_nothing_heavy(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    assert run([sys.executable, "-c", code], tmp_path).stdout.strip() == "[]"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the Makefile, and a program `python` that writes down how it is called instead of doing it."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/calls\n'
        'case "$*" in\n'
        "  --version) echo Python 3.9.1;;\n"
        '  "-c import sys"*) exit "${OLD:-0}";;\n'
        f'  "-m venv"*) mkdir -p "$3/bin"; cp {tmp_path}/python "$3/bin/python"; touch "$3/bin/pip" "$3/pyvenv.cfg";;\n'
        "esac\n"
    )
    program.chmod(0o755)
    return tmp_path


def make(checkout: Path, target: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The result of `make TARGET` and the calls of python it made."""
    calls = checkout / "calls"
    calls.unlink(missing_ok=True)
    result = run(["make", target, "PYTHON=./python", "VENV=moved/venv"], checkout, **environment)
    return result, calls.read_text().splitlines() if calls.exists() else []


def test_make_builds_the_environment_once(checkout: Path) -> None:
    def installs(target: str) -> list[str]:
        result, calls = make(checkout, target)
        assert result.returncode == 0, result.stderr
        return [call.split()[-1] for call in calls if "pip install" in call]

    assert installs("install") == ["."]
    assert installs("install") == []
    assert installs("install-dev") == [".[dev]"]
    assert installs("install-dev") == []
    assert installs("install") == []
    with (checkout / "pyproject.toml").open("a") as project:
        project.write("# changed\n")
    assert installs("install-dev") == [".[dev]"]
    assert not (checkout / ".venv").exists()
    assert make(checkout, "clean")[0].returncode == 0
    assert not (checkout / "moved" / "venv").exists()


def test_make_demo_runs_the_advertised_command(checkout: Path) -> None:
    _, calls = make(checkout, "demo")
    command = "-m routing_lab.train router=amod scaling=multiply seed=0,1,2 -m"
    assert calls[-1] == command
    assert f"python {command}" in (ROOT / "README.md").read_text()


def test_make_refuses_an_old_interpreter(checkout: Path) -> None:
    result, _ = make(checkout, "demo", OLD="1")
    assert result.returncode != 0
    assert "routing_lab needs Python 3.11 or newer; ./python is: Python 3.9.1" in result.stderr
    assert not (checkout / "moved").exists()


def test_make_lists_its_targets(checkout: Path) -> None:
    result = run(["make"], checkout)
    for target in ("demo", "test", "lint", "bench", "clean", "help"):
        assert f"make {target} " in result.stdout
