"""TensorBoard and W&B get what metrics.jsonl gets, and nothing that fails there ends a run; the
terminal gets its lines."""

import json
import struct
import sys
import time

import numpy as np
import pytest
from etils import epath
from refusals import refused
from tensorboardX.proto import event_pb2
from tiny import short_config

from maxmars.config import LogConfig
from maxmars.distributed.progress import Progress
from maxmars.train import train
from maxmars.train.metrics import read_metrics
from maxmars.train.sinks import Foreign, MetricsFile, Sink, Sinks, check_trackers, open_sinks


def read_events(path):
    """The events of a file: records of a length, its checksum, the event and its checksum."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
        at += length + 16


def read_tensorboard(directory):
    """Values by step and name as TensorBoard shows them: what a later part repeats is dropped."""
    rows = []
    for path in sorted(directory.iterdir()):
        for event in read_events(path):
            if event.HasField("session_log"):
                assert event.session_log.status == event_pb2.SessionLog.START
                rows = [row for row in rows if row[0] < event.step]
            rows += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return rows


def written_in(directory):
    lines = read_metrics(directory)
    return [(r["step"], k, float(v)) for r in lines for k, v in r.items() if k != "step"]


def same(rows, expected):
    assert [row[:2] for row in rows] == [row[:2] for row in expected]
    np.testing.assert_allclose(
        [row[2] for row in rows], [row[2] for row in expected], rtol=1e-6, atol=1e-30
    )


@pytest.mark.seconds
def test_tensorboard_has_every_line_of_the_metrics_once_also_after_a_kill(tmp_path):
    directory = tmp_path / "run"
    config = short_config(tmp_path / "tokens", log=LogConfig(every=1, tensorboard=True))
    train(config, directory)
    same(read_tensorboard(directory / "tensorboard"), written_in(directory))

    # As if killed before the second checkpoint: step 2 and its evaluation are made again.
    (directory / "checkpoints" / "2").rename(tmp_path / "lost")
    train(config, directory)
    rows = written_in(directory)
    assert sum(row[:2] == (2, "train/loss") for row in rows) == 1
    same(read_tensorboard(directory / "tensorboard"), rows)
    assert len(list((directory / "tensorboard").iterdir())) == 2


@pytest.mark.parametrize(
    ("package", "extra", "log"),
    [
        ("tensorboardX", "tensorboard", LogConfig(tensorboard=True)),
        ("wandb", "wandb", LogConfig(wandb="offline")),
    ],
)
def test_a_missing_package_is_found_before_the_workdir_is_begun(
    tmp_path, monkeypatch, package, extra, log
):
    monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    with refused(ImportError, package, f"[{extra}]'"):
        train(short_config(tmp_path / "tokens", log=log), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_files_of_wandb_do_not_go_into_a_bucket(monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with refused(ValueError, "log.wandb=offline", "gs://b/run"):
        check_trackers(LogConfig(wandb="offline"), epath.Path("gs://b/run"))


class Service(Sink):
    """A service that fails at one of its calls."""

    def __init__(self, fails=None):
        self.calls, self.fails = [], fails

    def _call(self, name):
        self.calls.append(name)
        if name == self.fails:
            raise RuntimeError("no connection\nand a long story")

    def write(self, step, metrics):
        self._call(f"write {step} {metrics}")

    def sync(self):
        self._call("sync")

    def close(self):
        self._call("close")


@pytest.mark.parametrize("fails", ["write 1 {'tokens': 16, 'a': 1.0}", "sync", "close"])
def test_a_service_that_fails_is_dropped_with_one_warning(tmp_path, fails):
    bad, good, logged = Service(fails), Service(), []
    services = [Foreign("W&B", lambda: bad, logged.append)]
    services.append(Foreign("TensorBoard", lambda: good, logged.append))
    with Sinks(MetricsFile(epath.Path(tmp_path)), services, lambda step: 16 * step) as sinks:
        sinks.write(1, {"a": 1.0})
        sinks.sync()
        sinks.write(2, {"a": 2.0})
    assert logged == ["W&B failed, and the run goes on without it (RuntimeError: no connection)."]
    assert bad.calls == good.calls[: good.calls.index(fails) + 1]
    written = ["write 1 {'tokens': 16, 'a': 1.0}", "write 2 {'tokens': 32, 'a': 2.0}"]
    assert good.calls == [written[0], "sync", written[1], "close"]


def opened(config, directory, resume_step, log):
    progress = Progress(quiet=True)
    progress.copy_to(log)

    def tokens(step):
        return step * config.tokens_per_step

    where = epath.Path(directory)
    return open_sinks(config, where, resume_step, tokens=tokens, progress=progress)


def test_a_service_that_does_not_open_is_dropped(tmp_path):
    logged = []
    (tmp_path / "tensorboard").touch()  # no directory can be made there
    config = short_config(tmp_path / "tokens", log=LogConfig(tensorboard=True))
    with opened(config, tmp_path, 0, logged.append):
        pass
    assert len(logged) == 1
    assert logged[0].startswith("TensorBoard failed, and the run goes on without it (NotADir")


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


def wandb_rows(path):
    """The rows of W&B's file in their order: W&B's number, and the values."""
    from wandb.proto import wandb_internal_pb2

    for data in leveldb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("history"):
            row = {i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
            values = {key: float(value) for key, value in row.items() if not key.startswith("_")}
            yield record.history.step.num, values


@pytest.mark.slow
def test_wandb_itself_gets_every_line_without_a_network_also_of_steps_made_again(
    tmp_path, monkeypatch
):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = short_config(tmp_path / "tokens", log=LogConfig(wandb="offline"))
    check_trackers(config.log, epath.Path(tmp_path))
    logged, files_of_starts, numbers = [], [], []

    def start(resume_step, *lines):
        with opened(config, tmp_path, resume_step, logged.append) as sinks:
            for step, values in lines:
                sinks.write(step, values)
        found = set((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
        (path,) = found.difference(files_of_starts)
        files_of_starts.append(path)
        assert f"wandb sync {path.parent}" in "\n".join(logged)
        tokens = config.tokens_per_step
        expected = [
            sorted({"step": float(step), "tokens": float(step * tokens), **values}.items())
            for step, values in lines
        ]
        rows, deadline = [], time.monotonic() + 30
        while len(rows) < len(lines) and time.monotonic() < deadline:
            time.sleep(0.1)  # W&B's own process may still write the file
            rows = list(wandb_rows(path))
        values = [sorted(values.items()) for _, values in rows]
        assert str(values) == str(expected)  # as text: nan is not nan
        numbers.extend(number for number, _ in rows)
        assert path.name == f"run-{json.loads((tmp_path / 'wandb.json').read_text())['id']}.wandb"
        time.sleep(1)  # W&B names the folder of a start by the second

    start(
        0,
        (0, {"eval/loss": 5.5}),
        (1, {"train/loss": 5.25, "train/skipped": 0.0}),
        (1, {"perf/step_time": float("nan")}),
        (3, {"train/loss": 5.0}),
        (2, {"eval/loss": 5.1}),  # an evaluation that was broken off
    )
    start(1, (2, {"train/loss": 4.0}), (3, {"train/loss": 3.0}))  # at another rate, after a kill
    assert files_of_starts[1].name == files_of_starts[0].name
    assert numbers == sorted(set(numbers))
    (tmp_path / "wandb.json").rename(tmp_path / "wandb.json.rewound")  # as `maxmars rewind` does
    start(2, (3, {"train/loss": 2.0}))
    assert files_of_starts[2].name != files_of_starts[0].name


@pytest.mark.slow
def test_without_an_account_wandb_online_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    with refused(ValueError, "log.wandb=online", "wandb login", "WANDB_API_KEY"):
        check_trackers(LogConfig(wandb="online"), epath.Path(tmp_path))
