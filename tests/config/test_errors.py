"""What is advised where an extra is missing, by how maxmars was installed (PEP 610)."""

import json

import pytest

from maxmars.config.errors import pip_install

REPOSITORY = {"vcs": "git", "requested_revision": "main", "commit_id": "1a2b"}


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (
            {"url": "file:///home/me/my%20code", "dir_info": {"editable": True}},
            "pip install -e '/home/me/my code[hf]'",
        ),
        ({"url": "file:///home/me/maxmars", "dir_info": {}}, "pip install '/home/me/maxmars[hf]'"),
        (
            {"url": "file:///tmp/maxmars-1-py3-none-any.whl", "archive_info": {}},
            "pip install '/tmp/maxmars-1-py3-none-any.whl[hf]'",
        ),
        (
            {"url": "https://a.b/c/maxmars", "vcs_info": REPOSITORY},
            "pip install 'maxmars[hf] @ git+https://a.b/c/maxmars@1a2b'",
        ),
        (
            {"url": "https://a.b/maxmars-1.tar.gz", "archive_info": {}},
            "pip install 'maxmars[hf] @ https://a.b/maxmars-1.tar.gz'",
        ),
        (None, "pip install 'maxmars[hf]'"),  # of an index
    ],
)
def test_an_extra_is_added_to_what_is_installed(tmp_path, monkeypatch, origin, command):
    metadata = tmp_path / "maxmars-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: maxmars\nVersion: 1\n")
    if origin is not None:
        (metadata / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    assert pip_install("hf") == f"`{command}`"
