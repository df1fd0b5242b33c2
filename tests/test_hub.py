"""Loading from the Hub, against an HTTP server on this machine. One client process runs all cases: imports are slow."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ZOO_V1, calibrated_artifact, zoo_state
from hub_server import HubServer, Repo

from oscar_hf import Artifact, ArtifactError
from oscar_hf.artifact import hub
from oscar_hf.artifact.artifact import CONFIG_FILE, TENSOR_FILE

ONE, TWO = "1" * 40, "2" * 40
SEQ = "Qwen3-8B/seq20000_prompt83_group128"

# Reads cases from stdin, runs each, writes what came of it. Waiting between retries is left out.
CLIENT = """
import json, os, sys, time, urllib.request
time.sleep = lambda seconds: None
from oscar_hf import Artifact, OscarCache
from oscar_hf.errors import ArtifactError
results, url = {}, os.environ["HF_ENDPOINT"]
for name, steps in json.load(sys.stdin):
    urllib.request.urlopen(f"{url}/_mark/{name}")
    for i, step in enumerate(steps if isinstance(steps, list) else [steps]):
        key = name if i == len(steps) - 1 or not isinstance(steps, list) else f"{name}.{i}"
        if step == "down":
            urllib.request.urlopen(f"{url}/_down")
            continue
        load = OscarCache.from_pretrained if step.pop("cache", False) else Artifact.load
        try:
            made = load(step.pop("repo"), **step)
            artifact = getattr(made, "artifact", made)
            results[key] = dict(tag=artifact.config.calibration.get("tag"), layers=len(artifact.layers),
                                recipe=artifact.config.recipe, source=artifact.source, first=float(
                                artifact.layers[0].key_transform.flatten()[0]) if artifact.layers else None)
        except ArtifactError as error:
            results[key] = dict(error=str(error))
        except Exception as error:
            results[key] = dict(crash=f"{type(error).__name__}: {error}")
json.dump(results, open(sys.argv[1], "w"))
"""


def artifact_files(folder, tag, seed, under=""):
    made = calibrated_artifact(seed=seed, calibration={"tag": tag})
    made.save(folder)
    return {under + name: (folder / name).read_bytes() for name in (CONFIG_FILE, TENSOR_FILE)}


def zoo_files(under):
    files = {}
    for seed, name in enumerate(ZOO_V1):
        buffer = io.BytesIO()
        torch.save(zoo_state(range(4), 16, 16, seed=100 * seed), buffer)
        files[under + name] = buffer.getvalue()
    return files


def repositories(folder):
    first, second = artifact_files(folder, "first", 0), artifact_files(folder, "second", 300)
    inner = artifact_files(folder, "inner", 600, "some/where/")
    config_only = {CONFIG_FILE: first[CONFIG_FILE]}
    Artifact.data_free("hadamard").save(folder)
    free = {CONFIG_FILE: (folder / CONFIG_FILE).read_bytes()}
    main = {"main": ONE}
    return {
        "org/plain": Repo({ONE: first | inner, TWO: second}, {"main": ONE, "v2": TWO}),
        "org/zoo": Repo({ONE: zoo_files(f"{SEQ}/") | {"README.md": b"#"}}, main),
        "org/private": Repo({ONE: first}, main, private=True),
        "org/gated": Repo({ONE: first}, main, gated=True),
        "org/no-tensors": Repo({ONE: config_only}, main),
        "org/nothing": Repo({ONE: {"README.md": b"#"}}, main),
        "org/free": Repo({ONE: free}, main),
        "org/half-zoo": Repo({ONE: dict([next(iter(zoo_files("").items()))])}, main),
        "org/junk": Repo({ONE: {CONFIG_FILE: b"<html>", TENSOR_FILE: b"x"}}, main),
        "org/cut": Repo({ONE: first}, main, cut={TENSOR_FILE}),
        "org/moving": Repo({ONE: first, TWO: second}, {"main": ONE}, moves_on_read=(CONFIG_FILE, "main", TWO)),
    }


def cases(tmp):
    plain, zoo = dict(repo="org/plain"), dict(repo="org/zoo", subfolder=SEQ)
    local = dict(local_files_only=True)
    return [
        ("by_id", plain),
        ("again", plain),
        ("through_the_cache", plain | dict(cache=True)),
        ("by_tag", plain | dict(revision="v2")),
        ("by_commit", plain | dict(revision=TWO)),
        ("subfolder", plain | dict(subfolder="some/where/")),
        ("zoo", zoo),
        ("zoo_root", dict(repo="org/zoo")),
        ("escape", plain | dict(subfolder="../../../etc")),
        ("private_without_token", dict(repo="org/private")),
        ("private_wrong_token", dict(repo="org/private", token="hf_bad")),
        ("private_with_token", dict(repo="org/private", token="hf_good")),
        ("gated_without_token", dict(repo="org/gated")),
        ("gated_wrong_token", dict(repo="org/gated", token="hf_bad")),
        ("gated_with_token", dict(repo="org/gated", token="hf_good")),
        ("no_repo", dict(repo="org/absent")),
        ("no_revision", plain | dict(revision="v9")),
        ("no_subfolder", plain | dict(subfolder="else/where")),
        ("no_artifact", dict(repo="org/nothing")),
        ("no_tensors", dict(repo="org/no-tensors")),
        ("half_zoo", dict(repo="org/half-zoo")),
        ("junk", dict(repo="org/junk")),
        ("bad_name", dict(repo="org/na me")),
        ("deep_name", dict(repo="org/zoo/Qwen3-8B")),
        ("data_free", dict(repo="org/free")),
        ("cut", dict(repo="org/cut")),
        ("moving", dict(repo="org/moving")),
        ("local_after_download", plain | local),
        ("local_zoo", zoo | local),
        ("local_never_downloaded", dict(repo="org/absent") | local),
        ("local_other_revision", plain | dict(revision="v9") | local),
        ("local_data_free", dict(repo="org/free") | local),
        ("other_cache", plain | dict(cache_dir=str(tmp / "other"))),
        ("other_cache_local", plain | local | dict(cache_dir=str(tmp / "third"))),
        ("down", ["down", plain]),
    ]


# After the server went down, in the same process; no marks can be set any more.
AFTER = [
    dict(repo="org/absent"),
    dict(repo="org/zoo", subfolder=SEQ),
    dict(repo="org/free"),
    dict(repo="org/plain", subfolder="x"),
]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("hub")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    listed = cases(tmp)
    listed[-1][1].extend(AFTER)
    with HubServer(repositories(tmp / "made")) as hub:
        environment |= dict(
            HF_ENDPOINT=hub.url, HF_HOME=str(tmp / "home"), HF_HUB_CACHE=str(tmp / "cache"), HF_HUB_DISABLE_XET="1",
            HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_TELEMETRY="1", NO_PROXY="127.0.0.1", no_proxy="127.0.0.1",
            PYTHONPATH=str(Path(__file__).parents[1]), OMP_NUM_THREADS="1",
        )  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, str(tmp / "results.json")], input=json.dumps(listed), text=True,
            env=environment, cwd=tmp, capture_output=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((tmp / "results.json").read_text()), hub, tmp


LOADED = {
    "by_id": "first", "again": "first", "through_the_cache": "first", "by_tag": "second", "by_commit": "second",
    "subfolder": "inner", "private_with_token": "first", "gated_with_token": "first", "local_after_download": "first",
    "other_cache": "first", "moving": "first", "down.1": "first",
}  # fmt: skip


@pytest.mark.parametrize("case", LOADED)
def test_loads_the_right_artifact(outcome, case):
    result = outcome[0][case]
    assert result.get("tag") == LOADED[case] and result["layers"] == 3, result
    seed = {"first": 0, "second": 300, "inner": 600}[LOADED[case]]
    # Config and tensors are of one commit.
    assert result["first"] == float(calibrated_artifact(seed=seed).layers[0].key_transform.flatten()[0])


@pytest.mark.parametrize("case", ["zoo", "local_zoo", "down.3"])
def test_loads_zoo_files_from_a_nested_folder(outcome, case):
    result = outcome[0][case]
    assert (result.get("recipe"), result.get("layers")) == ("paper", 4), result
    assert result["source"] == f"org/zoo/{SEQ}"


@pytest.mark.parametrize("case", ["data_free", "local_data_free", "down.4"])
def test_loads_an_artifact_without_tensors(outcome, case):
    assert outcome[0][case].get("recipe") == "hadamard", outcome[0][case]


REACH = ["no folder 'org/", "not in the local Hub cache, and the Hub cannot be reached", "HF_ENDPOINT"]
REFUSED = {
    "zoo_root": ["'org/zoo'", "holds none of oscar_config.json", "subfolder"],
    "escape": ["subfolder: got '../../../etc'", "without '..'"],
    "private_without_token": ["no Hub repository 'org/private' that you may read", "token=..."],
    "private_wrong_token": ["no Hub repository 'org/private' that you may read", "token=..."],
    "gated_without_token": ["'org/gated' is gated", "accept its terms"],
    "gated_wrong_token": ["'org/gated' is gated", "accept its terms"],
    "no_repo": ["no Hub repository 'org/absent'", "check the name"],
    "no_revision": ["'org/plain' has no revision 'v9'", "branch, tag or commit"],
    "no_subfolder": ["'org/plain/else/where' holds none of oscar_config.json"],
    "no_artifact": ["'org/nothing' holds none of oscar_config.json"],
    "no_tensors": ["org/no-tensors has oscar_config.json but no rotations.safetensors"],
    "half_zoo": ["lacks v_rotation_sst_r_h_pbr.pt"],
    "junk": ["oscar_config.json is not valid JSON"],
    "bad_name": ["'org/na me' is neither a folder nor a Hub repository id"],
    "deep_name": ["'org/zoo/Qwen3-8B' is not a folder", "goes into subfolder"],
    "cut": ["'org/cut' could not be read from the Hub"],
    "local_never_downloaded": ["'org/absent' is not in the local Hub cache", "local_files_only=False"],
    "local_other_revision": ["'org/plain' is not in the local Hub cache", "local_files_only=False"],
    "other_cache_local": ["'org/plain' is not in the local Hub cache", "local_files_only=False"],
    "down.2": REACH,
    "down": REACH,
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_in_one_clear_sentence(outcome, case):
    message = outcome[0][case].get("error", str(outcome[0][case]))
    assert "\n" not in message and all(words in message for words in REFUSED[case]), message


def test_every_case_is_expected(outcome):
    zoo_and_free = {"zoo", "local_zoo", "data_free", "local_data_free", "down.3", "down.4"}
    assert set(outcome[0]) == set(LOADED) | set(REFUSED) | zoo_and_free


def test_nothing_is_downloaded_twice(outcome):
    hub = outcome[1]
    gets = [path for method, path, _ in hub.requests("by_id") if method == "GET"]
    assert sorted(Path(path).name for path in gets) == [CONFIG_FILE, TENSOR_FILE]
    for case in ("again", "through_the_cache"):
        requests = hub.requests(case)
        assert len(requests) == 1 and requests[0][0] == "HEAD", "one look whether the branch moved"
    assert not [entry for entry in hub.requests("by_commit") if entry[0] == "GET"], "the tag had it already"


@pytest.mark.parametrize(
    "case", ["local_after_download", "local_zoo", "local_never_downloaded", "local_data_free", "escape"]
)
def test_no_request_is_made(outcome, case):
    assert outcome[1].requests(case) == []


def test_cache_dir_is_respected(outcome):
    _, hub, tmp = outcome
    found = sorted(path.name for path in (tmp / "other").rglob("snapshots/*/*"))
    assert found == [CONFIG_FILE, TENSOR_FILE]
    assert [entry for entry in hub.requests("other_cache") if entry[0] == "GET"], "it is another cache"
    assert not (tmp / "home" / "hub").exists() and (tmp / "cache" / "models--org--plain").is_dir()


@pytest.mark.parametrize("secret", ["hf_aSecretToken\n", " hf_aSecretToken", "hf_aSecretToken"])
def test_no_secret_is_passed_on(secret, monkeypatch):
    """A token with a line break, an address with a password, a signed address: the words are ours."""
    given = []

    def fail(**options):
        given.append(options["token"])
        raise ValueError(
            f"Illegal header value b'Bearer {secret}' at https://user:aSecretPassword@host/?Signature=aSecretKey"
        )

    monkeypatch.setattr(hub, "hf_hub_download", fail)
    with pytest.raises(ArtifactError) as caught:
        Artifact.load("owner/name", token=secret)
    assert given == ["hf_aSecretToken"] and "ecret" not in str(caught.value)
    assert str(caught.value) == "'owner/name' could not be read from the Hub: ValueError while its files were fetched"


@pytest.mark.parametrize("secret", ["hf_a\nSecret", "hf_a Secret", "hf_aSecr\u00e9t"])
def test_an_impossible_token_is_not_quoted(secret, monkeypatch):
    monkeypatch.setattr(hub, "hf_hub_download", None)
    with pytest.raises(ArtifactError, match="^token: it holds") as caught:
        Artifact.load("owner/name", token=secret)
    assert secret not in str(caught.value)
