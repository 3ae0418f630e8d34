"""An environment of their own for the other toolkits: the project's packages, and theirs on top."""

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

from konkanivani.base.errors import ResourceError

OURS = "konkanivani"
PACKAGES = ("speechbrain", "espnet", "matplotlib")


def pythons_of(toolkits: tuple[str, ...], folder: Path) -> dict[str, Path]:
    """Each toolkit's interpreter; the others' environment under `folder` is made where it is missing."""
    others = [toolkit for toolkit in toolkits if toolkit != OURS]
    pythons = {OURS: Path(sys.executable)} if OURS in toolkits else {}
    return pythons | (dict.fromkeys(others, peer_python(folder, PACKAGES)) if others else {})


def peer_python(folder: Path, packages: tuple[str, ...]) -> Path:
    """The Python of an environment under `folder` that has `packages`, made where it is not there yet.

    It sees the packages of the environment that this runs in, so that torch is the same and is not downloaded again.
    """
    environment = folder / hashlib.sha1(repr((packages, sys.prefix)).encode()).hexdigest()[:12]
    python, done = environment / "bin" / "python", environment / "done"
    if done.exists():
        return python
    print(f"Installing {', '.join(packages)} into {environment}: a minute or two, once.", file=sys.stderr, flush=True)
    _run([sys.executable, "-m", "venv", "--clear", str(environment)])
    own = next(environment.glob("lib/python*/site-packages"))
    (own / "project.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    _run([str(python), "-m", "pip", "install", "--quiet", *packages])
    done.touch()
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise ResourceError(
            f"The command {' '.join(command)} failed: {last}. The other toolkits come from PyPI: see that it can be "
            "reached, or leave them out of --contestants or --parts."
        )
