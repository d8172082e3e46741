"""Copies the Python standard library's own sources as text: `python text.py DIR`.

DIR/train gets them, DIR/held-out every twentieth file, which training never sees. Tests and
bundled packages are left out.
"""

import shutil
import sys
import sysconfig
from pathlib import Path

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip"}
HELD_OUT_EVERY = 20


def main(target: str) -> None:
    """Copies, and says how much there is."""
    library = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(library) for path in library.rglob("*.py"))
    names = [name for name in names if not LEFT_OUT & set(name.parts)]
    for number, name in enumerate(names, start=1):
        part = "held-out" if number % HELD_OUT_EVERY == 0 else "train"
        copy = Path(target, part, "_".join(name.parts))
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library / name, copy)
    print(f"{len(names)} files of {library}, {len(names) // HELD_OUT_EVERY} of them held out")


if __name__ == "__main__":
    main(*sys.argv[1:])
