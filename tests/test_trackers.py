"""TensorBoard and W&B get what metrics.jsonl gets, and nothing that fails there touches a run."""

import importlib.util
import json
import struct
import sys
import threading
import time
import types

import numpy as np
import pytest
from tensorboardX.proto import event_pb2
from tiny import short_config

from maxmars import trackers, workdir
from maxmars.config import CheckpointConfig, LogConfig, MeshConfig
from maxmars.metrics import MetricsWriter
from maxmars.trackers import Tracker, check_trackers, open_trackers
from maxmars.train import train


def read_events(path):
    """The events of a file: records of a length, its checksum, the event and its checksum."""
    data, found, at = path.read_bytes(), [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        found.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + length]))
        at += length + 16
    return found


def read_tensorboard(directory):
    """Values by step and name as TensorBoard shows them: what a later part repeats is dropped."""
    found = []
    for path in sorted(directory.iterdir()):
        for event in read_events(path):
            if event.HasField("session_log"):
                assert event.session_log.status == event_pb2.SessionLog.START
                found = [row for row in found if row[0] < event.step]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def read_metrics(directory):
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [(r["step"], k, float(v)) for r in lines for k, v in r.items() if k != "step"]


def same(found, expected):
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    np.testing.assert_allclose(
        [row[2] for row in found], [row[2] for row in expected], rtol=1e-6, atol=1e-30
    )


class FakeWandb(types.ModuleType):
    """Records what a run of W&B would be given."""

    def __init__(self, *, fails=None):
        super().__init__("wandb")
        self.rows, self.inits, self.finished, self.fails = [], [], 0, fails

    def Settings(self, **settings):  # noqa: N802, their name
        assert settings["console"] == "off"

    def init(self, **arguments):
        if self.fails == arguments["mode"]:
            raise RuntimeError("no server\nand a long story")
        self.inits.append(arguments)
        return self

    dir = "/somewhere/run/files"

    def log(self, metrics, step):
        if self.fails == "log":
            raise RuntimeError("no connection\nand a long story")
        if self.fails == "hang":
            time.sleep(60)
        self.rows += [(step, name, value) for name, value in metrics.items()]

    def finish(self):
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    def use(**arguments):
        module = FakeWandb(**arguments)
        module.__spec__ = importlib.util.spec_from_loader("wandb", None, origin="here")
        monkeypatch.setitem(sys.modules, "wandb", module)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        return module

    return use


def both(directory, **changes):
    return short_config(
        directory / "tokens",
        log=LogConfig(every=1, tensorboard=True, wandb="offline"),
        mesh=MeshConfig(data=1, fsdp=8),
        **changes,
    )


def test_both_have_every_line_of_the_metrics_once_also_after_a_kill(tmp_path, wandb, monkeypatch):
    fake, directory = wandb(), tmp_path / "run"
    keep = CheckpointConfig(every=1, keep_last=9)
    config = both(tmp_path, checkpoint=keep, num_steps=2)
    train(config, directory)
    same(read_tensorboard(directory / "tensorboard"), read_metrics(directory))
    same(fake.rows, read_metrics(directory))
    first = fake.inits[0]
    assert (first["mode"], first["project"], first["name"]) == ("offline", "maxmars", "tiny")
    assert first["config"]["global_batch_size"] == 16

    # As if killed before the second checkpoint: step 2 and its evaluation are made again.
    (directory / "checkpoints" / "2").rename(tmp_path / "lost")
    fake.rows.clear()
    train(config, directory)
    rows = read_metrics(directory)
    assert sum(row[:2] == (2, "train/loss") for row in rows) == 1
    same(read_tensorboard(directory / "tensorboard"), rows)
    assert len(list((directory / "tensorboard").iterdir())) == 2
    same(fake.rows, rows[-len(fake.rows) :])
    assert {row[0] for row in fake.rows} == {2}
    assert (
        fake.inits[1]["id"]
        == first["id"]
        == json.loads((directory / "wandb.json").read_text())["id"]
    )
    assert fake.finished == 2


@pytest.mark.parametrize(
    ("package", "extra"), [("tensorboardX", "tensorboard"), ("wandb", "wandb")]
)
def test_a_missing_package_is_found_before_the_workdir_is_begun(
    tmp_path, wandb, monkeypatch, package, extra
):
    wandb()
    find = importlib.util.find_spec
    monkeypatch.setattr(
        trackers.importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    with pytest.raises(ImportError, match=rf"pip install 'maxmars\[{extra}\]'"):
        train(both(tmp_path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_called_wandb_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(
        trackers.importlib.util,
        "find_spec",
        lambda name: importlib.machinery.PathFinder.find_spec(name, [str(tmp_path)]),
    )
    with pytest.raises(ImportError, match="needs the package wandb"):
        check_trackers(LogConfig(wandb="offline"), tmp_path)


def test_who_is_not_known_to_wandb_is_told_so(tmp_path, wandb, monkeypatch):
    fake = wandb()
    fake.login = lambda **_: False
    with pytest.raises(ValueError, match="run `wandb login`"):
        check_trackers(LogConfig(wandb="online"), tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(LogConfig(wandb="online"), tmp_path)
    with pytest.raises(ValueError, match=r"bucket, gs://bucket/run"):
        check_trackers(LogConfig(wandb="offline"), workdir.resolve("gs://bucket/run"))


def lines_to(tracker, count):
    for step in range(1, count + 1):
        tracker.write(step, {"a": float(step)})


def test_a_tracker_that_fails_is_told_of_once(tmp_path, wandb):
    fake, said = wandb(fails="log"), []
    config = both(tmp_path)
    for tracker in open_trackers(config, tmp_path, 0, say=said.append):
        lines_to(tracker, 3)
        tracker.close()
    assert said == ["W&B failed, and the run goes on without it (RuntimeError: no connection)."]
    assert fake.inits
    assert read_tensorboard(tmp_path / "tensorboard") == [(i, "a", float(i)) for i in (1, 2, 3)]


def test_where_wandb_has_no_server_it_keeps_the_run_on_the_disk(tmp_path, wandb):
    fake, said = wandb(fails="online"), []
    config = short_config(tmp_path / "tokens", log=LogConfig(wandb="online"))
    (tracker,) = open_trackers(config, tmp_path, 0, say=said.append)
    lines_to(tracker, 2)
    tracker.close()
    assert [row[0] for row in fake.rows] == [1, 2]
    assert fake.inits[0]["mode"] == "offline"
    assert said == [
        "W&B cannot be reached (no server); this part of the run is kept in /somewhere/run: upload "
        "it with `wandb sync`."
    ]


def test_a_tracker_that_hangs_makes_nobody_wait(monkeypatch):
    monkeypatch.setattr(trackers, "_MAX_LINES", 3)
    monkeypatch.setattr(trackers, "_SYNC_S", 0.05)
    monkeypatch.setattr(trackers, "_CLOSE_S", 0.05)
    released, said = threading.Event(), []

    class Hangs:
        note = None

        def write(self, step, metrics):
            released.wait()

        def close(self):
            pass

    tracker, began = Tracker("W&B", Hangs, said.append), time.monotonic()
    lines_to(tracker, 100)
    tracker.sync()
    tracker.close()
    assert time.monotonic() - began < 5
    assert [text.partition(":")[0] for text in said] == [
        "W&B takes no more lines",
        "W&B does not answer",
    ]
    released.set()


def test_in_a_bucket_the_file_of_tensorboard_is_uploaded_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "is_remote", lambda path: True)
    (tmp_path / "tensorboard").mkdir()
    config = short_config(tmp_path / "tokens", log=LogConfig(tensorboard=True))
    (tracker,) = open_trackers(config, tmp_path, 0, say=pytest.fail)
    tracker.write(1, {"a": 1.0})
    tracker.sync()
    assert read_tensorboard(tmp_path / "tensorboard") == [(1, "a", 1.0)]
    tracker.write(2, {"a": 2.0})
    tracker.close()
    assert read_tensorboard(tmp_path / "tensorboard") == [(1, "a", 1.0), (2, "a", 2.0)]


def leveldb_records(data):
    """The records of W&B's file: LevelDB's log format, after a header of seven bytes."""
    at, record = 7, b""
    while at < len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        if kind in (1, 4):  # whole, or its end
            yield record
            record = b""
        at += 7 + length


@pytest.mark.slow
def test_wandb_itself_takes_a_run_without_a_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setattr("maxmars.trackers._CLOSE_S", 120)  # its process starts slowly under load
    from wandb.proto import wandb_internal_pb2

    config = short_config(tmp_path / "tokens", log=LogConfig(wandb="offline"))
    check_trackers(config.log, tmp_path)
    trackers = open_trackers(config, tmp_path, 0, say=pytest.fail)
    with MetricsWriter(tmp_path, trackers=trackers) as writer:
        writer.write(0, {"eval/loss": 5.5})
        writer.write(1, {"train/loss": 5.25, "train/skipped": 0})
        writer.write(1, {"perf/step_time": float("nan")})
        writer.write(2, {"train/loss": 5.0})
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    found = {}
    for data in leveldb_records(path.read_bytes()):
        history = wandb_internal_pb2.Record.FromString(data).history
        row = {i.nested_key[0]: float(json.loads(i.value_json)) for i in history.item}
        found |= {(history.step.num, k): v for k, v in row.items() if not k.startswith("_")}
    written = sorted((row[:2], row[2]) for row in read_metrics(tmp_path))
    assert str(sorted(found.items())) == str(written)  # as text: nan is not nan
    assert path.name == f"run-{json.loads((tmp_path / 'wandb.json').read_text())['id']}.wandb"
