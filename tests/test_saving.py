"""Saving removes nothing that is not its own, loses nothing when it is stopped, and leaves modes as they were."""

import errno
import os
import stat

import pytest
import torch
from test_artifact import calibrated_artifact
from tiny_models import prompt, tiny_model

from oscar_hf import Artifact, OscarCache, OscarError
from oscar_hf.transformers_compat.versions import CACHE_ARGUMENT

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def cache():
    model = tiny_model("llama")
    made = OscarCache(model.config, recipe="hadamard", sink_tokens=4, recent_tokens=8)
    with torch.no_grad():
        model(input_ids=prompt(1, 40)[0], **{CACHE_ARGUMENT: made})
    return made


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_an_artifact_that_was_saved_inside_is_not_removed(cache, tmp_path):
    folder = cache.save_pretrained(tmp_path / "my", include_artifact=False)
    calibrated_artifact().save(folder / "artifact")
    before = contents(folder)
    with pytest.raises(OscarError, match="holds other files than a saved cache .artifact/oscar_config.json"):
        cache.save_pretrained(folder, include_artifact=False)
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["notes.txt", "artifact/notes.txt", "artifact/deep/oscar_config.json", "empty/"])
def test_files_of_others_are_not_removed_at_any_depth(cache, tmp_path, name):
    folder = cache.save_pretrained(tmp_path / "my")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if name.endswith("/") else path.write_text("mine")
    before = contents(folder)
    with pytest.raises(OscarError, match=name.rstrip("/")):
        cache.save_pretrained(folder)
    assert contents(folder) == before and path.exists()


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupt_between_the_renames_leaves_the_old_cache(cache, tmp_path, monkeypatch, at):
    folder = cache.save_pretrained(tmp_path / "my")
    before, real, calls = contents(folder), os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        cache.save_pretrained(folder)
    assert contents(folder) == before and os.listdir(tmp_path) == ["my"]


def test_modes_stay(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "umask", None)  # which other threads would see
    cache_folder = cache.save_pretrained(tmp_path / "cache")
    assert mode(cache_folder) == mode(tmp_path_made := _plain_folder(tmp_path)), tmp_path_made
    os.chmod(cache_folder, 0o700)
    cache.save_pretrained(cache_folder)
    assert mode(cache_folder) == 0o700 and all(mode(path) & 0o077 == 0 for path in cache_folder.rglob("*"))
    artifact_folder = calibrated_artifact().save(tmp_path / "artifact")
    os.chmod(artifact_folder / "rotations.safetensors", 0o600)
    calibrated_artifact(seed=3).save(artifact_folder)
    assert mode(artifact_folder / "rotations.safetensors") == 0o600


def _plain_folder(tmp_path):
    folder = tmp_path / "plain"
    folder.mkdir()
    return folder


def test_a_full_disk_is_one_sentence_and_loses_nothing(cache, tmp_path, monkeypatch):
    folder, artifact = cache.save_pretrained(tmp_path / "my"), calibrated_artifact()
    other = artifact.save(tmp_path / "other")
    before = contents(tmp_path)

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("oscar_hf.cache.save_load.save_file", fail)
    monkeypatch.setattr("oscar_hf.artifact.artifact.save_file", fail)
    for save in (lambda: cache.save_pretrained(folder), lambda: artifact.save(other)):
        with pytest.raises(
            OscarError, match="cannot save a.* in .*: No space left on device; nothing there was changed"
        ):
            save()
    assert contents(tmp_path) == before


def test_a_parent_that_is_a_file_is_one_sentence(cache, tmp_path):
    (tmp_path / "file").write_text("")
    for save in (
        lambda: cache.save_pretrained(tmp_path / "file" / "x"),
        lambda: calibrated_artifact().save(tmp_path / "file" / "x"),
    ):
        with pytest.raises(OscarError, match="cannot save a"):
            save()


def test_what_a_killed_save_left_is_removed(cache, tmp_path, monkeypatch):
    import oscar_hf.saving as saving

    old = saving._scratch_path(tmp_path / "my", "saving")
    old = old.with_name(old.name.replace(f"-{os.getpid()}-", "-99999999-"))
    running = saving._scratch_path(tmp_path / "my", "saving")
    for folder in (old, running):
        folder.mkdir()
        os.utime(folder, (0, 0))
    cache.save_pretrained(tmp_path / "my")
    assert not old.exists() and running.exists()
    running.rmdir()


def test_saving_again_over_what_was_saved(cache, tmp_path):
    folder = cache.save_pretrained(tmp_path / "my")
    cache.save_pretrained(folder)
    assert OscarCache.load(folder).get_seq_length() == 40 and os.listdir(tmp_path) == ["my"]
    assert Artifact.load(folder / "artifact").is_data_free
