"""Text files: found in a fixed order, checked, read as documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triptych.errors import DataError
from triptych.train import corpus as module
from triptych.train.corpus import documents, read_corpus
from triptych.train.files import find_files


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def texts(*patterns: object, **options: str) -> list[str]:
    """Whole documents."""
    found: list[str] = [""]
    for piece in documents(read_corpus([str(p) for p in patterns], **options)):  # type: ignore[arg-type]
        found[-1] += piece.text
        if piece.ends_document:
            found.append("")
    return found[:-1]


def test_files_directories_and_globs_are_found_once_and_sorted(tmp_path: Path) -> None:
    write(tmp_path, {"b/x.txt": "1", "a.txt": "2", "b/c/y.md": "3"})
    patterns = [str(tmp_path / "b"), str(tmp_path / "a.txt"), str(tmp_path / "**" / "*.txt")]
    names = [str(path.relative_to(tmp_path)) for path in find_files(patterns)]
    assert names == ["a.txt", "b/c/y.md", "b/x.txt"]


def test_excluded_globs_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "", "test/b.py": "", "lib/site-packages/c.py": "", "held.py": ""})
    found = find_files([str(tmp_path)], ["**/site-packages/**", "test/*", "held.py"])
    assert [path.name for path in found] == ["a.py"]


def test_every_pattern_without_files_is_told(tmp_path: Path) -> None:
    write(tmp_path, {"train.txt": "x"})
    with pytest.raises(DataError) as caught:
        find_files([str(tmp_path / "trian.txt"), str(tmp_path / "*.md")])
    assert "train.txt" in str(caught.value) and "*.md" in str(caught.value)


def test_a_text_file_is_one_document_with_its_line_ends(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "one\r\ntwo\n", "b.txt": "", "c.txt": "drei\nvier"})
    assert texts(tmp_path) == ["one\r\ntwo\n", "drei\nvier"]


def test_each_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
    lines = [json.dumps({"body": "a\nb"}), "", json.dumps({"body": "ü", "id": 1})]
    write(tmp_path, {"a.jsonl": "\n".join(lines)})
    assert texts(tmp_path, text_key="body") == ["a\nb", "ü"]


def test_a_line_without_the_text_key_is_told_with_the_key_it_has(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": '{"body": "x"}\n'})
    with pytest.raises(DataError) as caught:
        texts(tmp_path)
    assert "line 1" in str(caught.value) and 'text_key = "body"' in str(caught.value)


@pytest.mark.parametrize("line", ["{broken", "[1, 2]", '{"text": 3}'])
def test_a_bad_line_of_jsonl_is_told_with_its_number(tmp_path: Path, line: str) -> None:
    write(tmp_path, {"a.jsonl": '{"text": "x"}\n' + line})
    with pytest.raises(DataError, match="line 2"):
        texts(tmp_path)


def test_files_that_are_not_text_are_left_out_of_a_directory_and_counted(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "x", "b.bin": b"\xff\xfe\x00", "c.bin": "a\0b", "d.txt": b"\xc3"})
    corpus = read_corpus([str(tmp_path)])
    assert [file.path.name for file in corpus.files] == ["a.txt"]
    assert corpus.num_skipped == 3


def test_a_file_named_by_itself_must_be_text(tmp_path: Path) -> None:
    write(tmp_path, {"b.bin": b"\xff\xfe"})
    with pytest.raises(DataError, match="not UTF-8"):
        read_corpus([str(tmp_path / "b.bin")])


def test_a_long_document_comes_in_pieces_that_end_with_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 16)
    text = "".join(f"line {i}\n" for i in range(20)) + "x" * 50 + "\nend"
    write(tmp_path, {"a.txt": text})
    pieces = list(documents(read_corpus([str(tmp_path)])))
    assert "".join(piece.text for piece in pieces) == text
    assert all(piece.text.endswith("\n") for piece in pieces[:-1])
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 5


def test_the_digest_is_of_contents_not_of_names(tmp_path: Path) -> None:
    first = read_corpus([str(write(tmp_path / "1", {"a.txt": "x", "b.txt": "y"}))])
    moved = read_corpus([str(write(tmp_path / "2", {"c.txt": "x", "d.txt": "y"}))])
    other = read_corpus([str(write(tmp_path / "3", {"a.txt": "y", "b.txt": "x"}))])
    assert first.digest == moved.digest != other.digest
