"""Where the code that runs comes from: a checkout, a wheel, or an address that pip installed."""

import json
import subprocess

import pytest

from maxmars.config.checkout import COMMIT, git_commit, wheel_sha256


def test_the_commit_of_a_checkout(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    assert git_commit(tmp_path) is None
    (tmp_path / "a.py").touch()
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    assert git_commit(tmp_path) == commit
    (tmp_path / "a.py").write_text("changed = 1\n")
    assert git_commit(tmp_path) == f"{commit}-dirty"
    assert wheel_sha256(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "commit", "sha256"),
    [
        ({}, None, None),
        ({COMMIT: "a1\n"}, "a1", None),
        ({"direct_url.json": {"archive_info": {"hash": "sha256=b2"}}, COMMIT: "a1"}, "a1", "b2"),
        ({"direct_url.json": {"archive_info": {}}}, None, None),  # not every installer notes it
        ({"direct_url.json": {"vcs_info": {"vcs": "git", "commit_id": "c3"}}}, "c3", None),
    ],
)
def test_what_an_installation_tells(tmp_path, files, commit, sha256):
    info = tmp_path / "maxmars-1.0.dist-info"
    info.mkdir()
    for name, content in ({"METADATA": "Name: maxmars\n"} | files).items():
        (info / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert git_commit(tmp_path) == commit
    assert wheel_sha256(tmp_path) == sha256
