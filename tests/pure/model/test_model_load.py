"""What a user may type for a model, and what is said when nothing fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triptych.errors import ModelError
from triptych.model.catalogue import catalogue
from triptych.model.load import hub_cache, load_model

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 100,
}


def write_config(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return path


@pytest.mark.parametrize("text", ["Llama-3.1-70B", "llama-3.1-70b", "meta-llama/Llama-3.1-70B"])
def test_a_catalogue_name_is_found_in_any_case_and_within_a_hub_id(text: str) -> None:
    assert load_model(text, {}) == catalogue()["Llama-3.1-70B"]


def test_a_directory_and_its_file_give_the_same_model(tmp_path: Path) -> None:
    path = write_config(tmp_path / "mine")
    assert load_model(str(path), {}) == load_model(str(path.parent), {})
    assert load_model(str(path), {}).name == "mine"


def test_a_file_of_any_name_is_named_after_itself(tmp_path: Path) -> None:
    path = write_config(tmp_path).rename(tmp_path / "small.json")
    assert load_model(str(path), {}).name == "small"


def test_a_hub_id_is_found_in_the_local_cache(tmp_path: Path) -> None:
    write_config(tmp_path / "models--org--mine" / "snapshots" / "abc")
    model = load_model("org/mine", {"HF_HUB_CACHE": str(tmp_path)})
    assert (model.name, model.num_layers) == ("mine", 3)


def test_main_decides_between_snapshots(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--mine"
    write_config(folder / "snapshots" / "old", num_hidden_layers=1)
    write_config(folder / "snapshots" / "new", num_hidden_layers=2)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("old")
    assert load_model("org/mine", {"HF_HUB_CACHE": str(tmp_path)}).num_layers == 1


def test_the_catalogue_comes_before_the_cache(tmp_path: Path) -> None:
    write_config(tmp_path / "models--org--GPT-2" / "snapshots" / "abc")
    assert load_model("org/GPT-2", {"HF_HUB_CACHE": str(tmp_path)}) == catalogue()["GPT-2"]


def test_the_cache_folder_follows_the_hubs_own_variables() -> None:
    assert hub_cache({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert hub_cache({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}) == Path("/b/hub")
    assert hub_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    assert hub_cache({}) == Path.home() / ".cache/huggingface/hub"


def test_an_unknown_name_lists_close_names(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_model("llama-3.1-7b", {"HF_HUB_CACHE": str(tmp_path)})
    assert "Llama-3.1-70B" in caught.value.problems[0].works
    assert str(tmp_path) in caught.value.problems[0].what


def test_a_name_like_no_other_lists_all(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_model("zzzzzzzz", {"HF_HUB_CACHE": str(tmp_path)})
    assert "GPT-2" in caught.value.problems[0].works


def test_a_directory_without_a_configuration_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model(str(tmp_path), {})


def test_a_path_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no file or directory"):
        load_model(str(tmp_path / "config.json"), {})


@pytest.mark.parametrize("text", ["{", "[1]", '"llama"'])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(str(path), {})


def test_binary_content_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(str(path), {})
