"""Damage a file of a run or of its tokens, start the run again, and judge what comes out.

    python tools/damage.py [--damages 400] [--seed 0] [--out DIR]

A tiny GPT-2 is trained by the command line: from other weights, in two sessions, with a field that
changes, on text files prepared with a tokenizer of their own. Then, again and again, one file of
its working directory or of the token directory is damaged, and the same command continues the run
for four steps. An undisturbed run has made them too.

A start is sound if
* it ends with the state and the metrics of the undisturbed run, or names the damaged file,
* what it can write anew (config.json, tokenizer/, ...) is as in the undisturbed run,
* every other checkpoint of before is still there, byte by byte, and the damaged one is set aside,
* it goes on in spite of any damage to the working directory; damaged tokens it may refuse, in one
  line that names them,
* no stack trace is printed.

Before some starts `maxmars audit`, `eval`, `generate`, `export` or `report` reads the damaged run:
it succeeds, or ends with one line. The table counts the outcomes by the kind of file and of damage;
`DIR/rounds.jsonl` has what each round printed. Exits with 1 if there was a fault. The commands run
one after the other in a process that has loaded JAX, some in a process of their own; a round takes
1 to 2 s.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS, MORE = 12, 16  # of the run before the damage, and after it
EVERY = 4  # steps between checkpoints and evaluations
ROUNDS_A_WORKER = 60
LIMIT_S = 180.0
OWN_PROCESS = 25  # every so many rounds the start is a process of its own
READERS = 0.3  # share of rounds in which another command reads the damaged run first
CHANGE = ("--optimizer.learning-rate", "2e-5", "--resume-overrides", "optimizer.learning_rate")

CONFIG = f"""
from maxmars.config import *


def get_config() -> TrainConfig:
    return TrainConfig(
        name="damage",
        num_steps={MORE},
        global_batch_size=4,
        model=GPT2Config(
            num_layers=1, num_heads=2, embed_dim=16, max_seq_len=16, vocab_size=300,
            compute_dtype="float32", remat=None,
        ),
        optimizer=MarsConfig(learning_rate=1e-5),
        schedule=ScheduleConfig(warmup_steps=2, decay_steps=100),
        data=TokenShardsConfig(path="tokens", packing="best_fit"),
        eval=EvalConfig(every={EVERY}, num_windows=8),
        checkpoint=CheckpointConfig(every={EVERY}, keep_last=10),
        guard=GuardConfig(loss_spike_threshold=1.0, history=3, max_consecutive_skips=10),
        log=LogConfig(every=1),
    )
"""


Damage = Callable[[Path, random.Random], None]


# --- damage --------------------------------------------------------------------------------------


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def halve(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path, chance: random.Random) -> None:
    path.write_bytes(b"")


def delete(path: Path, chance: random.Random) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def put_directory(path: Path, chance: random.Random) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def randomize(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(path.stat().st_size))


def zero(path: Path, chance: random.Random) -> None:
    """The last blocks hold zeros, as after a power cut."""
    content = path.read_bytes()
    kept = chance.choice([0, len(content) // 2 // 512 * 512])
    path.write_bytes(content[:kept].ljust(len(content), b"\0"))


def append_garbage(path: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(chance.randbytes(100) + b"\n")


def forbid(path: Path, chance: random.Random) -> None:
    path.chmod(0)


def put_link(path: Path, chance: random.Random) -> None:
    delete(path, chance)
    path.symlink_to(path.parent / "nowhere" / "nothing")


def put_file(path: Path, chance: random.Random) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"no directory\n")


def empty_directory(path: Path, chance: random.Random) -> None:
    shutil.rmtree(path)
    path.mkdir()


def as_json(change: Callable[[Any, random.Random], Any]) -> Damage:
    """Damage of a JSON file, or of a line of a file of them; `change` gives a value or text."""

    def damage(path: Path, chance: random.Random) -> None:
        lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
        number = chance.randrange(len(lines))
        changed = change(json.loads(lines[number]), chance)
        lines[number] = changed if isinstance(changed, str) else json.dumps(changed)
        path.write_text("\n".join(lines) + "\n")

    return damage


def _some_object(value: Any, chance: random.Random) -> dict[str, Any]:
    """An object with fields somewhere in a value."""
    found = [value] if isinstance(value, dict) and value else []
    children = value.values() if isinstance(value, dict) else value
    found += [_some_object(child, chance) for child in children if isinstance(child, dict | list)]
    return chance.choice([fields for fields in found if fields] or [{}])


def without_field(value: Any, chance: random.Random) -> Any:
    fields = _some_object(value, chance)
    del fields[chance.choice(sorted(fields))]
    return value


def with_other_type(value: Any, chance: random.Random) -> Any:
    fields = _some_object(value, chance)
    other = chance.choice([None, True, -7, 1e300, "text", [], {}, [[1]], {"a": 1}])
    fields[chance.choice(sorted(fields))] = other
    return value


def with_huge_number(value: Any, chance: random.Random) -> str:
    fields = _some_object(value, chance)
    fields[chance.choice(sorted(fields))] = "HUGE"
    huge = chance.choice(["1e999", "-1e999", "NaN", "9" * 30, "9" * 5000])
    return json.dumps(value).replace('"HUGE"', huge)


def no_json(value: Any, chance: random.Random) -> str:
    return chance.choice(["[" * 100_000, "{", "null", "[]", '"text"', "0", '{"a": 1} {"b": 2}'])


FILE_DAMAGES: dict[str, Damage] = {
    "bit flipped": flip,
    "cut to half": halve,
    "emptied": empty,
    "deleted": delete,
    "a directory": put_directory,
    "random bytes": randomize,
    "zeros": zero,
    "garbage after it": append_garbage,
    "a link to nowhere": put_link,
    **({"not readable": forbid} if os.geteuid() else {}),
}
DIRECTORY_DAMAGES: dict[str, Damage] = {
    "deleted": delete,
    "a file": put_file,
    "emptied": empty_directory,
    "a link to nowhere": put_link,
}
JSON_DAMAGES: dict[str, Damage] = {
    "a field removed": as_json(without_field),
    "another type": as_json(with_other_type),
    "a huge number": as_json(with_huge_number),
    "no JSON object": as_json(no_json),
}
NEEDS_CONTENT = ("bit flipped", "cut to half", "emptied", "random bytes", "zeros", *JSON_DAMAGES)


def kinds_of_damage(path: Path) -> dict[str, Damage]:
    if path.is_dir():
        return DIRECTORY_DAMAGES
    kinds = dict(FILE_DAMAGES)
    if path.suffix in (".json", ".jsonl"):
        kinds |= JSON_DAMAGES
    if not path.stat().st_size:
        kinds = {name: damage for name, damage in kinds.items() if name not in NEEDS_CONTENT}
    return kinds


def kind_of_file(name: str) -> str:
    """What a file is, by its name relative to the directory of the rounds."""
    in_checkpoint = re.fullmatch(r"run/checkpoints/\d+(/.*)?", name)
    if in_checkpoint is None:
        return re.sub(r"\d+(?=\.)", "N", name)
    rest = re.sub(r"/d/.*", "/d/*", in_checkpoint[1] or "")
    return f"checkpoints/N{re.sub(r'process_[0-9]+', 'process_N', rest)}"


# --- processes -----------------------------------------------------------------------------------


def _serve(connection: Any) -> None:
    """Run commands of maxmars for another process, one after the other, each into its file."""
    import traceback

    from maxmars.cli import main

    while True:
        try:
            argv, path = connection.recv()
        except EOFError:
            return
        sys.stdout.flush(), sys.stderr.flush()
        with open(path, "wb") as file:
            os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        code: Any = 0
        try:
            main(argv)
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush(), sys.stderr.flush()
        connection.send(code)


class Worker:
    """A process that runs commands of maxmars; another takes its place when it ends."""

    def __init__(self) -> None:
        self._process: Any = None
        self._runs = 0

    def run(self, argv: Sequence[str], path: Path, *, alone: bool = False) -> tuple[int, str]:
        """Exit code and output of a command; code -1 if it did not end within `LIMIT_S`."""
        if alone:
            command = [sys.executable, "-m", "maxmars", *argv]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S
            )
            return done.returncode, done.stdout.decode(errors="replace")
        if self._process is None or self._runs >= ROUNDS_A_WORKER:
            self.close()
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,))
            self._process.start()
            theirs.close()
        self._runs += 1
        self._connection.send((list(argv), str(path)))
        try:
            code = self._connection.recv() if self._connection.poll(LIMIT_S) else -1
        except EOFError:  # it ended itself, by os._exit or a signal
            self._process.join()
            code = self._process.exitcode or 0
        if code == -1 or not self._process.is_alive():
            self.close()
        return code, path.read_text(errors="replace")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
        self._process, self._runs = None, 0


# --- rounds --------------------------------------------------------------------------------------


@dataclass
class Result:
    """What a start of the run left, for comparison with another."""

    digest: str
    metrics: list[Any]
    rebuilt: dict[str, Any]
    """Files of the working directory that each start writes anew."""
    checkpoints: dict[str, str]
    """A digest of all files of each directory of checkpoints."""

    @staticmethod
    def of(run: Path) -> Result:
        from maxmars.checkpoint import read

        names = ("config.json", "environment.json", "data.json", "parameters.txt")
        names += ("tokenizer/tokenizer_config.json", "tokenizer/tokenizer.json")
        rebuilt: dict[str, Any] = {name: content(run / name) for name in names}
        with contextlib.suppress(ValueError, OSError):
            summary = json.loads((run / "summary.json").read_text())
            kept = ("name", "done", "step", "data_digest", "tokens")
            rebuilt["summary.json"] = {name: summary[name] for name in kept}
        return Result(
            digest=read(run / "checkpoints").digest,
            metrics=metrics_of(run),
            rebuilt=rebuilt,
            checkpoints={p.name: digest_of(p) for p in (run / "checkpoints").iterdir()},
        )


def metrics_of(run: Path) -> list[Any]:
    """What a run measured, without rates and times, in order."""
    from maxmars.train.metrics import read_metrics

    keys = ("train/loss", "train/grad_norm", "eval/loss", "train/skipped")
    return sorted((row["step"], k, row[k]) for row in read_metrics(run) for k in keys if k in row)


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def digest_of(path: Path) -> str:
    """Of the names and contents of all files below a path."""
    sha = hashlib.sha256()
    for file in sorted([path, *path.rglob("*")]):
        sha.update(f"{file.relative_to(path)}\0".encode() + (content(file) or b"") + b"\0")
    return sha.hexdigest()


class Rounds:
    """The directories of all rounds: `origin`, `tokens` and `run`, and how they were before."""

    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.chance = out, random.Random(seed)
        self.worker = Worker()
        self.table: dict[tuple[str, str], Counter[str]] = {}
        self.faults: list[str] = []
        self.number = 0
        self.files: dict[str, list[str]] = {}

    def maxmars(self, *argv: str, alone: bool = False) -> tuple[int, str]:
        return self.worker.run(argv, self.out / "output.txt", alone=alone)

    def must(self, *argv: str) -> str:
        code, output = self.maxmars(*argv)
        if code:
            raise SystemExit(f"maxmars {' '.join(argv)} failed:\n{output}")
        return output

    def train(self, *options: str, alone: bool = False) -> tuple[int, str]:
        config, run, origin = (str(self.out / name) for name in ("config.py", "run", "origin"))
        data = str(self.out / "tokens")
        command = ["train", config, "--workdir", run, "--init-from", origin, "--data.path", data]
        return self.maxmars(*command, "--num-processes", "1", *options, alone=alone)

    def prepare(self) -> None:
        """Make tokens and run, remember them, and what an undisturbed start makes of them."""
        import tokenizers

        texts = self.out / "texts"
        texts.mkdir()
        words = random.Random(0)
        for number in range(12):
            text = " ".join(words.choice(WORDS) for _ in range(1500))
            (texts / f"{number:02}.txt").write_text(text)
        trained = tokenizers.Tokenizer(tokenizers.models.BPE())
        trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trained.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        trained.train([str(path) for path in sorted(texts.iterdir())], trainer)
        trained.save(str(self.out / "tokenizer.json"))
        (self.out / "config.py").write_text(CONFIG)
        tokens, config = str(self.out / "tokens"), str(self.out / "config.py")
        best_fit = ("--pack", "best_fit", "--pack-length", "16", "--shard-tokens", "4000")
        tokenizer = ("--tokenizer", str(self.out / "tokenizer.json"))
        self.must("data", "prepare", f"{texts}/*.txt", tokens, *tokenizer, *best_fit)
        origin = str(self.out / "origin")
        alone = ("--num-processes", "1")  # a process joins others at its first command or never
        data = ("--data.path", tokens)
        self.must("train", config, "--workdir", origin, *data, *alone, "--num-steps", "2")
        for options in (("--num-steps", str(STEPS - EVERY)), ("--num-steps", str(STEPS), *CHANGE)):
            code, output = self.train(*options)
            if code:
                raise SystemExit(output)
        shutil.copytree(self.out / "run", self.out / "before" / "run")
        shutil.copytree(self.out / "tokens", self.out / "before" / "tokens")
        for path in sorted((self.out / "before").rglob("*")):
            name = str(path.relative_to(self.out / "before"))
            if name not in ("run", "tokens", "run/checkpoints"):
                self.files.setdefault(kind_of_file(name), []).append(name)
        code, output = self.resume()
        if code:
            raise SystemExit(output)
        self.undisturbed = Result.of(self.out / "run")
        self.usual = {plain(line) for line in output.splitlines()}

    def resume(self, *, alone: bool = False) -> tuple[int, str]:
        return self.train("--num-steps", str(MORE), *CHANGE, alone=alone)

    def restore(self) -> None:
        for name in ("run", "tokens"):
            shutil.rmtree(self.out / name, ignore_errors=True)
            shutil.copytree(self.out / "before" / name, self.out / name)

    def round(self, kind_of: str, name: str, kind: str) -> None:
        """Damage a file, read the run, start it, and judge."""
        self.number += 1
        self.restore()
        path = self.out / name
        seed = self.chance.random()
        kinds_of_damage(path)[kind](path, random.Random(seed))
        told: dict[str, Any] = {"round": self.number, "file": name, "damage": kind}
        faults = []
        if self.chance.random() < READERS:
            command = self.chance.choice(["audit", "eval", "generate", "export", "report"])
            told[command] = self.read(command, name, faults)
        code, output = self.resume(alone=self.number % OWN_PROCESS == 0)
        lines = [line for line in output.splitlines() if plain(line) not in self.usual]
        outcome = self.judge(name, code, output, lines, faults)
        told |= {"outcome": outcome, "code": code, "faults": faults, "lines": lines}
        with (self.out / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(told) + "\n")
        self.table.setdefault((kind_of, kind), Counter())[outcome if not faults else "FAULT"] += 1
        for fault in faults:
            self.faults.append(f"round {self.number}: {name}, {kind}: {fault}")
            print(self.faults[-1], flush=True)

    def read(self, command: str, name: str, faults: list[str]) -> list[str]:
        """Let another command read the damaged run; what it printed."""
        run = str(self.out / "run")
        shutil.rmtree(self.out / "exported", ignore_errors=True)
        options = {
            "audit": (run,),
            "eval": (run, "--tasks", "loss", "--data.num-windows", "4", "--num-processes", "1"),
            "generate": (run, "--prompt", "one", "--max-new-tokens", "3"),
            "export": (run, str(self.out / "exported")),
            "report": (run, "--out", str(self.out / "report")),
        }
        before = digest_of(self.out / "run")
        code, output = self.maxmars(command, *options[command])
        lines = output.splitlines()
        if "Traceback" in output:
            faults.append(f"{command} printed a stack trace")
        if code not in (0, 1):
            faults.append(f"{command} ended with {code}")
        if command != "audit" and code and len(errors_in(lines)) != 1:
            faults.append(f"{command} failed without one line that says why")
        if digest_of(self.out / "run") != before:
            faults.append(f"{command} changed the run")
        if command == "audit" and name == "run/metrics.jsonl":
            lost = metrics_of(self.out / "run") != metrics_of(self.out / "before" / "run")
            if lost and not (code and "metrics.jsonl is not what was recorded" in output):
                faults.append("SILENT: audit does not tell that metrics are lost or changed")
        if command == "audit":
            vouched = name.startswith(("run/checkpoints/", "run/metrics", "run/receipts"))
            if code and not vouched:
                faults.append(f"audit calls the run broken: {lines[-3:]}")
            if not code and "one trajectory" not in output:
                faults.append("audit gave no verdict")
        return [f"exit code {code}", *lines]

    def judge(self, name: str, code: int, output: str, lines: list[str], faults: list[str]) -> str:
        """The outcome of a start, and its faults."""
        said = any(is_about(line, name) for line in lines)
        if "Traceback" in output:
            faults.append("a stack trace")
        self.check_older(name, faults)
        if code:
            if len(errors_in(lines)) != 1:
                faults.append(f"exit code {code} without one line that says why")
            elif name.startswith("run/") and not name.endswith("/.lock"):
                faults.append(f"stopped: {errors_in(lines)[0]}")
            elif not said:
                faults.append(f"refused without the name of the file: {errors_in(lines)[0]}")
            return "refused in one line"
        found = Result.of(self.out / "run")
        if found.digest != self.undisturbed.digest:
            faults.append("another state in the end")
        if found.metrics != self.undisturbed.metrics and not said:
            faults.append(f"SILENT: {first_difference(self.undisturbed.metrics, found.metrics)}")
        for file, kept in self.undisturbed.rebuilt.items():
            if found.rebuilt.get(file) != kept:
                faults.append(f"{file} is not as it should be")
        if f"continuing from step {STEPS}" not in output and not said:
            faults.append("SILENT: the newest checkpoint was not used")
        return "told, same end" if said else "same end"

    def check_older(self, name: str, faults: list[str]) -> None:
        """Every checkpoint is where it was, and as it was; a damaged one may be set aside."""
        damaged = name.split("/")[2] if name.startswith("run/checkpoints/") else None
        for before in sorted((self.out / "before" / "run" / "checkpoints").iterdir()):
            now = self.out / "run" / "checkpoints" / before.name
            aside = now.with_name(f"{before.name}.damaged")
            if before.name == ".lock":
                continue
            if before.name == damaged:
                gone = name == f"run/checkpoints/{damaged}"  # all of it was
                if not gone and not now.exists() and not aside.exists():
                    faults.append(f"the damaged checkpoint {damaged} was deleted")
            elif not now.exists() or digest_of(now) != digest_of(before):
                faults.append(f"the checkpoint {before.name} was lost or changed")


WORDS = ["one", "two", "three", "house", "river", "green", "stone", "a", "of", "in", "naïve\n"]


def plain(line: str) -> str:
    """A line of output without its numbers, which differ from run to run."""
    return re.sub(r"[\d.,:]+ ?([kMGnmµ]?s?|min|h)?\b", "#", line).strip()


def errors_in(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if line.startswith("maxmars: error: ")]


def is_about(line: str, name: str) -> bool:
    """Whether a line names a file, its checkpoint, or the directory that it lies in."""
    parts = name.split("/")
    if name.startswith("run/checkpoints/"):
        return re.search(rf"checkpoints/{parts[2]}\b|of step {parts[2]},", line) is not None
    if parts[0] == "tokens":
        return "/tokens" in line
    return parts[1] in line


def first_difference(one: list[Any], other: list[Any]) -> str:
    missing, more = [m for m in one if m not in other], [m for m in other if m not in one]
    return f"{len(missing)} metrics lost or changed, {len(more)} new, first {(missing + more)[0]}"


def damage(count: int, seed: int, out: Path, only: str = "") -> bool:
    """Whether all rounds were sound; those of files with `only` in the name of their kind."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(out / "cache"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    rounds = Rounds(out, seed)
    started = time.monotonic()
    try:
        rounds.prepare()
        print(f"{len(rounds.files)} kinds of files, {sum(map(len, rounds.files.values()))} files")
        todo: list[tuple[str, str, str]] = []
        while len(todo) < count:  # every kind of file in turn, with a damage of it by chance
            wanted = [kind_of for kind_of in sorted(rounds.files) if only in kind_of]
            for kind_of in rounds.chance.sample(wanted, len(wanted)):
                name = rounds.chance.choice(rounds.files[kind_of])
                kinds = kinds_of_damage(out / "before" / name)
                todo.append((kind_of, name, rounds.chance.choice(sorted(kinds))))
        for kind_of, name, kind in todo[:count]:
            rounds.round(kind_of, name, kind)
    finally:
        rounds.worker.close()
    show(rounds)
    verdict = f"{len(rounds.faults)} FAULTS" if rounds.faults else "no fault"
    print(f"{count} damages in {time.monotonic() - started:.0f} s: {verdict}")
    return not rounds.faults


def show(rounds: Rounds) -> None:
    """Print the table of what was tried, and all faults."""
    width = max(len(kind_of) for kind_of, _ in rounds.table)
    print(f"\n{'file':<{width}}  {'damage':<18}{'tried':>5}  outcomes")
    for (kind_of, kind), outcomes in sorted(rounds.table.items()):
        told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        print(f"{kind_of:<{width}}  {kind:<18}{outcomes.total():>5}  {told}")
    total = sum(rounds.table.values(), Counter())
    print(", ".join(f"{count} {outcome}" for outcome, count in total.most_common()))
    for fault in rounds.faults:
        print(fault)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--damages", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0, help="of files and damages")
    parser.add_argument("--only", default="", help="damage files whose kind has this in its name")
    parser.add_argument("--out", type=Path, help="directory to keep the rounds in")
    arguments = parser.parse_args()
    if arguments.damages < 1:
        parser.error("--damages must be at least 1.")
    if arguments.out is not None:
        arguments.out.mkdir(parents=True)
        out = arguments.out.absolute()
        sys.exit(not damage(arguments.damages, arguments.seed, out, arguments.only))
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(not damage(arguments.damages, arguments.seed, Path(scratch), arguments.only))


if __name__ == "__main__":
    main()
