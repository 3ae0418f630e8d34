"""Python environment of the other toolkits: the project's packages plus theirs."""

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

from konkanivani.base.errors import ResourceError

OURS = "konkanivani"
PACKAGES = ("speechbrain", "espnet", "matplotlib")


def pythons_of(toolkits: tuple[str, ...], folder: Path) -> dict[str, Path]:
    """Return each toolkit's Python; create the environment of the others under `folder` unless it exists."""
    others = [toolkit for toolkit in toolkits if toolkit != OURS]
    pythons = {OURS: Path(sys.executable)} if OURS in toolkits else {}
    return pythons | (dict.fromkeys(others, peer_python(folder, PACKAGES)) if others else {})


def peer_python(folder: Path, packages: tuple[str, ...]) -> Path:
    """Return the Python of an environment under `folder` with `packages`; create it unless it exists.

    Raises ResourceError if the installation fails.
    """
    # Other packages, or another base environment, have another folder.
    environment = folder / hashlib.sha1(repr((packages, sys.prefix)).encode()).hexdigest()[:12]
    # `done` is created last, so that an interrupted installation is repeated.
    python, done = environment / "bin" / "python", environment / "done"
    if done.exists():
        return python
    print(f"Installing {', '.join(packages)} into {environment}: a minute or two, once.", file=sys.stderr, flush=True)
    _run([sys.executable, "-m", "venv", "--clear", str(environment)])
    own = next(environment.glob("lib/python*/site-packages"))
    # The packages of the running environment are visible too: both use the same torch, without another download.
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
