"""`triptych measure` refuses what cannot work before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.cli.main import run


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--out", "there.txt"], "ends in .toml"),
        (["--out", "missing/there.toml"], "mkdir -p missing"),
        (["--out", "folder.toml"], "folder.toml is a folder"),
        (["--ranks", "0"], "--ranks"),
        (["--rank", "2"], "--ranks"),
    ],
)
def test_bad_options_are_told_and_nothing_is_written(
    args: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    assert run(["measure", *args]) == 2
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["folder.toml"]


def test_a_launcher_says_how_many_ranks_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["measure", "--ranks", "2"]) == 2
    assert "no --ranks" in capsys.readouterr().err
