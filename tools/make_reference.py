"""Runs the optimizers' official PyTorch code for the numbers in tests/reference.

    python tools/make_reference.py --mars MARS --soap SOAP --sophia SOPHIA [--check FOLDER]

MARS, SOAP and SOPHIA are clones of AGI-Arena/MARS, nikhilvyas/SOAP and Liuhong99/Sophia. `--check`
writes nothing: it runs the code on the inputs that lie in FOLDER and says how far the numbers there
are from its own; any of the clones will do for it. It needs PyTorch and NumPy alone.

`optimizer_reference.npz` has parameters, gradients and learning rates, and for each case the
parameters after the last step; `gpt2_reference.npz` has the official GPT's parameters and batches,
its loss and gradients on the first microbatch, the logits of its first window, and the losses of
training runs. Matrices are PyTorch's, [out, in]. The JSON beside each has the arguments and the
clones' commits. All is float64, Newton-Schulz too, which the official code runs in bfloat16; a case
whose "ns" is bfloat16 runs as the code stands, in float32. Inputs are multiples of 1/64, times a
power of two, so that float16 holds them exactly.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

SHIPPED = Path(__file__).resolve().parents[1] / "tests" / "reference"
CLONES = ("mars", "soap", "sophia")
Arrays = dict[str, np.ndarray]

# --- what is run ---------------------------------------------------------------------------------

STEPS, KEPT = 12, (12,)
SHAPES = {
    "embedding": (7, 4),
    "wide": (4, 9),
    "square": (4, 4),
    "tall": (9, 4),
    "norm": (4,),
    "bias": (5,),
}
MATRICES = ("wide", "square", "tall")

MARS = {
    "betas": (0.95, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "gamma": 0.025,
    "lr_1d": 0.005,
    "betas_1d": (0.9, 0.95),
    "weight_decay_1d": 0.1,
}
MARS_M = {
    "wd": 0.1,
    "momentum": 0.95,
    "ns_steps": 5,
    "adamw_betas": (0.9, 0.95),
    "adamw_eps": 1e-8,
    "gamma": 0.025,
}
MOONLIGHT = {name: value for name, value in MARS_M.items() if name != "gamma"}


def mars(mars_type: str, **changes: Any) -> dict[str, Any]:
    return {"kind": "mars", "kw": MARS | {"mars_type": f"mars-{mars_type}"} | changes}


CASES: dict[str, dict[str, Any]] = {
    "mars_adamw": mars("adamw"),
    "mars_adamw_1d": mars("adamw", optimize_1d=True),
    "mars_adamw_exact": mars("adamw", is_approx=False),
    "mars_adamw_gamma0": mars("adamw", gamma=0.0),
    "mars_adamw_gamma_large": mars("adamw", gamma=0.5),
    "mars_adamw_amsgrad": mars("adamw", amsgrad=True),
    "mars_lion": mars("lion"),
    "mars_lion_1d": mars("lion", optimize_1d=True),
    "mars_lion_exact": mars("lion", is_approx=False),
    "mars_shampoo": mars("shampoo"),
    "mars_shampoo_1d": mars("shampoo", optimize_1d=True),
    "mars_shampoo_exact": mars("shampoo", is_approx=False),
    "mars_shampoo_bf16": mars("shampoo") | {"ns": "bfloat16"},
    "mars_m": {"kind": "mars_m", "kw": MARS_M},
    "mars_m_exact": {"kind": "mars_m", "kw": MARS_M | {"is_approx": False}},
    "mars_m_efficient": {"kind": "mars_m_efficient", "kw": MARS_M},
    # Muon has no rule for vectors, and SOAP's of vectors is not ours. Its weight decay takes the
    # updated parameters, and ours those before the update.
    "muon": {"kind": "muon", "kw": {"weight_decay": 0.1}, "names": MATRICES},
    "moonlight": {"kind": "moonlight", "kw": MOONLIGHT},
    "soap": {
        "kind": "soap",
        "kw": {"weight_decay": 0.0, "precondition_frequency": 3, "max_precond_dim": 8},
        "names": MATRICES,
    },
    "sophia": {
        "kind": "sophia",
        "kw": {"betas": (0.9, 0.8), "rho": 0.05, "weight_decay": 0.2},
        "batch_tokens": 20,
        "update_hessian_every": 3,
    },
}

MODEL = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 8,
    "block_size": 16,
    "vocab_size": 32,
    "dropout": 0.0,
    "bias": False,
    "scale_attn_by_inverse_layer_idx": True,
}
BATCH, ACCUM = 4, 2
ADAMW = {
    "optimizer": "adamw",
    "lr": 2e-2,
    "min_lr": 1e-3,
    "warmup": 3,
    "weight_decay": 0.1,
    "betas": (0.9, 0.95),
    "grad_clip": 1.0,
}


def trained_by_mars(mars_type: str, **changes: Any) -> dict[str, Any]:
    arguments = {name: value for name, value in MARS.items() if name != "eps"}
    switches = {"optimizer": "mars", "is_approx": True, "optimize_1d": False, "lr_1d": 1e-2}
    return ADAMW | arguments | switches | {"mars_type": f"mars-{mars_type}"} | changes


RUNS: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "mars_adamw": trained_by_mars("adamw"),
    "mars_adamw_exact": trained_by_mars("adamw", is_approx=False),
    "mars_adamw_1d": trained_by_mars("adamw", optimize_1d=True),
    "mars_lion": trained_by_mars("lion", lr=4e-3, lr_1d=2e-3),
    "mars_shampoo": trained_by_mars("shampoo"),
}


def draw_inputs() -> tuple[tuple[dict, Arrays], tuple[dict, Arrays]]:
    """New inputs for both files."""
    rng = np.random.default_rng(2411)

    def draw(*shape: int) -> np.ndarray:
        return rng.integers(-64, 65, shape) / 64

    # Some corrected gradients are longer than 1, which clips them, and others are not.
    scales = 2.0 ** -np.array([0, 3, 1, 5, 2, 4, 0, 6, 3, 1, 4, 2])
    arrays: Arrays = {"lr": 0.008 * 2.0 ** -np.abs(np.arange(STEPS) - 3.0)}
    for name, shape in SHAPES.items():
        arrays[f"params0/{name}"] = draw(*shape)
        for kind in ("grads", "prev_grads"):
            steps = scales.reshape(-1, *[1] * len(shape))
            arrays[f"{kind}/{name}"] = draw(STEPS, *shape) * steps
    lr0 = float(arrays["lr"][0])
    cases = {name: case | {"lr0": lr0} for name, case in CASES.items()}
    info = {"shapes": SHAPES, "steps": STEPS, "kept_steps": KEPT, "cases": cases}

    windows = (STEPS + 1, ACCUM, BATCH, MODEL["block_size"] + 1)
    gpt2: Arrays = {"batches": rng.integers(0, MODEL["vocab_size"], windows).astype(np.uint8)}
    width, layers = MODEL["n_embd"], range(MODEL["n_layer"])
    shapes = {"wte": (MODEL["vocab_size"], width), "wpe": (MODEL["block_size"], width)}
    for i in layers:
        shapes |= {
            f"h.{i}.ln_1": (width,),
            f"h.{i}.attn.c_attn": (3 * width, width),
            f"h.{i}.attn.c_proj": (width, width),
            f"h.{i}.ln_2": (width,),
            f"h.{i}.mlp.c_fc": (4 * width, width),
            f"h.{i}.mlp.c_proj": (width, 4 * width),
        }
    for name, shape in (shapes | {"ln_f": (width,)}).items():
        around = 1.0 if ".ln_" in f".{name}" else 0.0
        gpt2[f"params0/transformer.{name}.weight"] = around + draw(*shape) / 2
    gpt2_info = {"model": MODEL, "steps": STEPS, "batch": BATCH, "accum": ACCUM, "runs": RUNS}
    gpt2_info["kept_windows"] = 1  # of whose logits
    return (info, arrays), (gpt2_info, gpt2)


# --- the official code ---------------------------------------------------------------------------


def copy_in_float64(clone: Path, folder: Path) -> Path:
    """A copy of a clone's Python files with float64 on the CPU in place of bfloat16, float32 and
    CUDA."""
    for path in clone.rglob("*.py"):
        text = path.read_text()
        text = text.replace(".bfloat16()", ".double()").replace(".float()", ".double()")
        text = text.replace("device='cuda', dtype=torch.bfloat16", "dtype=torch.float64")
        target = folder / path.relative_to(clone)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"official_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The clone that a case comes from, the file in it and the class.
PLACES = {
    "mars": ("mars", "MARS/optimizers/mars.py", "MARS"),
    "mars_m": ("mars", "MARS_M/optimizers/mars_m.py", "MARS_M"),
    "mars_m_efficient": ("mars", "MARS_M/optimizers/mars_m_efficient.py", "MARS_M_Efficient"),
    "muon": ("mars", "MARS/optimizers/muon.py", "Muon"),
    "moonlight": ("mars", "MARS_M/optimizers/moonlight.py", "Moonlight"),
    "soap": ("soap", "soap.py", "SOAP"),
    "sophia": ("sophia", "sophia.py", "SophiaG"),
}


def run_case(make: Callable[..., Any], case: dict[str, Any], inputs: Arrays, info: dict) -> Arrays:
    """Parameters after each step of one case, [steps, ...]."""
    dtype = torch.float32 if case.get("ns") == "bfloat16" else torch.float64
    names = list(case.get("names", info["shapes"]))
    params = {
        name: torch.nn.Parameter(torch.tensor(inputs[f"params0/{name}"], dtype=dtype))
        for name in names
    }
    matrices = [p for name, p in params.items() if p.ndim == 2 and name != "embedding"]
    if case["kind"] in ("mars_m", "mars_m_efficient", "moonlight"):
        rest = [p for name, p in params.items() if p.ndim == 1 or name == "embedding"]
        optimizer = make(lr=case["lr0"], muon_params=matrices, adamw_params=rest, **case["kw"])
    else:
        optimizer = make(list(params.values()), lr=case["lr0"], **case["kw"])

    def give(kind: str, step: int) -> None:
        for name, param in params.items():
            param.grad = torch.tensor(inputs[f"{kind}/{name}"][step], dtype=dtype)

    history: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for step, rate in enumerate(inputs["lr"]):
        for group in optimizer.param_groups:
            group["lr"] = float(rate)
        is_exact = case["kw"].get("is_approx") is False
        if step and is_exact:  # nothing precedes the first
            give("prev_grads", step)
            optimizer.update_previous_grad()
            optimizer.update_last_grad()
        if step and case["kind"] == "sophia" and step % case["update_hessian_every"] == 0:
            give("prev_grads", step)  # they stand for the gradients on sampled labels
            optimizer.update_hessian()
        give("grads", step)
        optimizer.step(**({"bs": case["batch_tokens"]} if case["kind"] == "sophia" else {}))
        for name, param in params.items():
            history[name].append(param.detach().numpy().copy())
    return {name: np.stack(arrays) for name, arrays in history.items()}


def optimizer_numbers(
    clones: dict[str, Path], copies: dict[str, Path], info: dict, inputs: Arrays
) -> Arrays:
    """`CASE/NAME` [kept steps, ...] of each case whose clone is there."""
    numbers = {}
    kept = [step - 1 for step in info.get("kept_steps", range(1, info["steps"] + 1))]
    for case_name, case in info["cases"].items():
        clone, file, class_name = PLACES[case["kind"]]
        if clone not in clones:
            continue
        root = clones[clone] if case.get("ns") == "bfloat16" else copies[clone]
        make = getattr(load(root / file), class_name)
        for name, history in run_case(make, case, inputs, info).items():
            numbers[f"{case_name}/{name}"] = history[kept]
    return numbers


def gpt2_numbers(copy: Path, info: dict, inputs: Arrays) -> Arrays:
    """What the official GPT computes of the first microbatch, and its training runs."""
    sys.path.insert(0, str(copy / "MARS"))  # for its own `optimizers`
    official = load(copy / "MARS" / "model.py")
    batches = torch.tensor(inputs["batches"].astype(np.int64))

    def new_model() -> Any:
        with contextlib.redirect_stdout(sys.stderr):  # it prints its size
            model = official.GPT(official.GPTConfig(**info["model"])).double()
        for name, param in model.named_parameters():
            param.data.copy_(torch.tensor(inputs[f"params0/{name}"], dtype=torch.float64))
        return model

    model = new_model()
    logits, loss = apply(model, batches[0, 0])
    loss.backward()
    kept = logits[: info.get("kept_windows")]
    numbers = {"logits": kept.detach().numpy(), "loss": loss.detach().numpy()}
    numbers |= {f"grad/{name}": p.grad.numpy() for name, p in model.named_parameters()}
    for name, run in info["runs"].items():
        for key, value in train(new_model(), run, batches, info).items():
            numbers[f"run/{name}/{key}"] = value
    return numbers


def apply(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and loss of windows [rows, tokens + 1]."""
    return model(tokens[:, :-1], tokens[:, 1:].contiguous())


def train(model: Any, run: dict[str, Any], batches: torch.Tensor, info: dict) -> Arrays:
    """The official training loop on one device, but for the gradients of microbatches, of which it
    takes the sum and this the mean."""
    named = (
        "gamma",
        "is_approx",
        "mars_type",
        "optimize_1d",
        "lr_1d",
        "betas_1d",
        "weight_decay_1d",
    )
    own = {name: run[name] for name in named} if run["optimizer"] == "mars" else None
    arguments = (run["optimizer"], run["weight_decay"], run["lr"], run["betas"], "cpu", own)
    with contextlib.redirect_stdout(sys.stderr):
        optimizer = model.configure_optimizers(*arguments)
    is_exact = not run.get("is_approx", True)

    def gradient(batch: torch.Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for tokens in batch:
            loss = apply(model, tokens)[1] / len(batch)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run["grad_clip"])
        return total

    losses, rates = [], []
    for step in range(info["steps"]):
        rate = run["lr"] * step / run["warmup"]
        if step >= run["warmup"]:
            progress = (step - run["warmup"]) / (info["steps"] - run["warmup"])
            cosine = 0.5 * (1 + math.cos(math.pi * progress))
            rate = run["min_lr"] + cosine * (run["lr"] - run["min_lr"])
        for group in optimizer.param_groups:
            group["lr"] = rate
        if is_exact:  # of the next batch at these parameters
            gradient(batches[step + 1])
            optimizer.update_previous_grad()
        losses.append(gradient(batches[step]))
        rates.append(rate)
        optimizer.step()
        if is_exact:
            optimizer.update_last_grad()
    table = model.transformer.wte.weight.detach().numpy()
    return {"loss": np.array(losses), "lr": np.array(rates), "params/transformer.wte.weight": table}


# --- writing and checking ------------------------------------------------------------------------


def write(folder: Path, name: str, info: dict, inputs: Arrays, numbers: Arrays) -> None:
    exact = {}
    for key, array in inputs.items():
        narrow = array if key in ("lr", "batches") else array.astype(np.float16)
        assert np.array_equal(narrow, array)
        exact[key] = narrow
    folder.mkdir(exist_ok=True)
    for key in [key for key in numbers if "/params/" in key]:
        numbers[key] = numbers[key].astype(np.float32)
    # Archives of the checkout compress it with the headers of its many small arrays, a third of it.
    np.savez(folder / f"{name}.npz", allow_pickle=False, **exact, **numbers)
    (folder / f"{name}.json").write_text(json.dumps(info, indent=1) + "\n")
    print(f"{folder / name}.npz: {(folder / f'{name}.npz').stat().st_size:,} bytes")


def compare(stored: Arrays, numbers: Arrays) -> float:
    """Print the largest difference of each case; return the largest of those in float64."""
    largest: dict[str, float] = {}
    worst = 0.0
    for key, array in numbers.items():
        case = "/".join(key.split("/")[: 2 if key.startswith("run/") else 1])
        difference = float(np.abs(array.astype(stored[key].dtype) - stored[key]).max())
        largest[case] = max(largest.get(case, 0.0), difference)
        if stored[key].dtype == np.float64:
            worst = max(worst, difference)
    for case, difference in largest.items():
        print(f"{case:26} {difference:.1e}")
    return worst


def commit_of(clone: Path) -> str:
    command = ["git", "-C", str(clone), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in CLONES:
        parser.add_argument(f"--{name}", type=Path, metavar="CLONE")
    parser.add_argument("--check", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    clones = {name: getattr(args, name) for name in CLONES if getattr(args, name)}
    if not clones or (len(clones) < len(CLONES) and not args.check):
        parser.error("name the clones: --mars, --soap and --sophia, or one of them with --check.")
    commits = {name: commit_of(clone) for name, clone in clones.items()}
    torch.compiler.set_stance("force_eager")
    torch.set_num_threads(1)  # of such small tensors
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory() as scratch:
        copies = {n: copy_in_float64(clone, Path(scratch, n)) for n, clone in clones.items()}

        def optimizers(info: dict, inputs: Arrays) -> Arrays:
            return optimizer_numbers(clones, copies, info, inputs)

        def gpt2(info: dict, inputs: Arrays) -> Arrays:
            return gpt2_numbers(copies["mars"], info, inputs) if "mars" in copies else {}

        worst = 0.0
        for name, run, (info, inputs) in zip(
            ("optimizer_reference", "gpt2_reference"),
            (optimizers, gpt2),
            draw_inputs(),
            strict=True,
        ):
            if args.check:
                stored = dict(np.load(args.check / f"{name}.npz"))
                info = json.loads((args.check / f"{name}.json").read_text())
                worst = max(worst, compare(stored, run(info, stored)))
            else:
                write(SHIPPED, name, info | {"clones": commits}, inputs, run(info, inputs))
    if args.check:
        print(f"The largest difference in float64 is {worst:.1e}.")
    return int(worst > 1e-9)


if __name__ == "__main__":
    sys.exit(main())
