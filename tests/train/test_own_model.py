"""Models of the user's own: trained, continued, evaluated, planned, and refused in one line."""

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hellaswag_questions import write_questions_file
from markdown_pages import blocks_of
from plain_scores import plain_scorer
from refusals import refused, stopped
from safetensors.numpy import load_file
from tiny import (
    ADAMW,
    MODEL,
    first_difference,
    first_state,
    random_batch,
    series,
    short_config,
    sophia,
)
from trees import mesh_of

from maxmars.cli import main
from maxmars.cli.parse import ConfigArguments, parse_arguments
from maxmars.config import (
    CheckpointConfig,
    EvalConfig,
    MarsConfig,
    MeshConfig,
    ModuleConfig,
    MuonConfig,
    ScheduleConfig,
)
from maxmars.config.errors import in_words
from maxmars.distributed.files import sha256_of
from maxmars.eval import load
from maxmars.eval.generate import GREEDY, generate_texts, generate_tokens
from maxmars.eval.hellaswag import HellaSwag, load_questions
from maxmars.eval.loglikelihood import LogLikelihoods, encode_choices, pack_choices
from maxmars.eval.trained_model import export_model
from maxmars.model.language_model import check_model, make_model, mean_loss, token_losses
from maxmars.model.parameters import Parameters, init_params
from maxmars.optim import MatrixSpec
from maxmars.plan import get_topology, make_plan
from maxmars.plan.compile import peak_bytes
from maxmars.train import train
from maxmars.train.init_from import InitFrom
from maxmars.train.metrics import read_metrics

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "tools" / "examples" / "own_model.py"
OPTIONS = {"num_layers": 2, "num_heads": 4, "embed_dim": 32, "dtype": "float32"}
OWN = ModuleConfig(make=f"{EXAMPLE}:make", options=OPTIONS, vocab_size=257, max_seq_len=16)
SHAMPOO = MarsConfig(variant="shampoo", vector_learning_rate_scale=0.15)


def own_config(folder, **changes):
    options = {
        "model": OWN,
        "optimizer": MarsConfig(),
        "num_steps": 4,
        "schedule": ScheduleConfig(warmup_steps=0, decay_steps=4),
        "checkpoint": CheckpointConfig(every=None),
        "eval": EvalConfig(every=None),
    }
    return short_config(folder / "tokens", **(options | changes))


# --- a run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory, byte_tokens):
    """A run of the example from the command line, with HellaSwag in the loop."""
    folder = tmp_path_factory.mktemp("own")
    questions = write_questions_file(folder / "questions.jsonl")
    options = f"""--num-processes 1 --num-steps 4 --global-batch-size 8 --log.every 1
        --model.options.num-layers 2 --model.options.embed-dim 32 --model.max-seq-len 128
        --mesh.data 1 --mesh.fsdp 4 --mesh.tensor 2
        --eval.num-windows 16 --eval.batch-size 16
        --eval.hellaswag-every 100 --eval.hellaswag-path {questions}"""
    config = f"{EXAMPLE}:optimizer=mars_shampoo,data={byte_tokens}"
    main(["train", config, "--workdir", str(folder / "run"), *options.split()])
    return folder / "run"


@pytest.fixture(scope="module")
def trained(run):
    return load(run)


@pytest.mark.seconds
def test_a_run_from_the_command_line_is_evaluated_as_it_evaluated_itself(run, capsys):
    report = run.parent / "report.json"
    questions = str(run.parent / "questions.jsonl")
    options = ["--num-processes", "1", "--hellaswag.path", questions]
    main(["eval", str(run), "--output", str(report), *options])
    scores = json.loads(report.read_text())
    lines = {key: value for line in read_metrics(run) for key, value in line.items()}
    assert scores["loss"] == pytest.approx(lines["eval/loss"], rel=1e-6)
    for protocol, name in (("lm_eval", "hellaswag"), ("completion", "hellaswag_completion")):
        assert scores["hellaswag"][protocol]["acc_norm"] == lines[f"eval/{name}_acc_norm"]
    assert "HellaSwag" in capsys.readouterr().out


def test_questions_are_scored_as_each_ending_alone(run, trained):
    questions = load_questions(run.parent / "questions.jsonl")
    scorer = HellaSwag(trained.config, trained.mesh, trained.tokenizer, questions)
    log_likelihoods = scorer(trained.params)["completion"].log_likelihoods
    score, encode = plain_scorer(trained.config, trained.params), trained.tokenizer.encode
    expected = [
        [score(encode(q.context), encode(f" {ending}"))[0] for ending in q.endings]
        for q in questions
    ]
    np.testing.assert_allclose(log_likelihoods, expected, rtol=2e-5)


@pytest.mark.seconds
def test_continuations_share_a_row_where_the_module_takes_their_numbers(trained, run_of_the_page):
    choices = [encode_choices("a b", [" c", " d"], trained.tokenizer)]
    assert len(pack_choices(choices, trained.config).rows) == 1
    model = load(run_of_the_page)
    packed = pack_choices(choices, model.config)
    assert len(packed.rows) == 2
    log_likelihoods = LogLikelihoods(model.config, model.mesh)(model.params, packed).log_likelihoods
    score = plain_scorer(model.config, model.params)
    expected = [score(choices[0].context, ending)[0] for ending in choices[0].continuations]
    np.testing.assert_allclose(log_likelihoods[0], expected, rtol=2e-5)


def test_generated_text_is_that_of_whole_forward_passes(trained):
    longest = 16  # a context that the longer prompt fills, and both outgrow
    model = dataclasses.replace(
        trained, config=dataclasses.replace(trained.config, max_seq_len=longest)
    )
    prompts = [np.arange(3, dtype=np.int32), np.arange(40, dtype=np.int32)]
    forward = jax.jit(make_model(model.config, model.params))

    def plain(prompt):
        tokens, start = prompt.tolist(), max(0, len(prompt) - longest)
        for _ in range(20):
            if len(tokens) - start > longest:
                start = len(tokens) - longest // 2
            seen = tokens[start:]
            logits = forward(jnp.array([seen + [0] * (longest - len(seen))]))
            tokens.append(int(logits[0, len(seen) - 1, :257].argmax()))
        return tokens[len(prompt) :]

    generated = generate_tokens(model, prompts, max_new_tokens=20, sampling=GREEDY)
    assert [tokens.tolist() for tokens in generated] == [plain(prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def exported(run):
    main(["export", str(run), str(run.parent / "hf")])
    return run.parent / "hf"


def test_a_module_says_itself_what_its_export_is(exported, trained):
    fields = json.loads((exported / "config.json").read_text())
    assert fields["architectures"] == ["Qwen3ForCausalLM"]
    assert (fields["vocab_size"], fields["eos_token_id"], fields["dtype"]) == (257, 256, "float32")
    arrays = load_file(exported / "model.safetensors")
    assert len(arrays) == 3 + 2 * 11
    np.testing.assert_array_equal(arrays["lm_head.weight"], trained.params["lm_head"][:257])
    kernel = np.asarray(trained.params["blocks"]["qkv"][1])  # [embed, qkv, heads, head_dim]
    np.testing.assert_array_equal(
        arrays["model.layers.1.self_attn.k_proj.weight"], kernel[:, 1].reshape(32, 32).T
    )
    card = (exported / "README.md").read_text()
    assert "Qwen3ForCausalLM.from_pretrained" in card
    assert "GPT2" not in card


@pytest.mark.peers
def test_transformers_computes_the_same_logits(exported, trained):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        exported, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = np.random.default_rng(0).integers(0, 257, (2, 100))
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits, trained.model(tokens)[..., :257], atol=1e-4)


def test_export_refuses_a_module_that_does_not_say_it(run_of_the_page, tmp_path):
    where = run_of_the_page / "checkpoints" / "40"
    with refused(ValueError, where, "my_model.py:make", "GPT-2"):
        export_model(run_of_the_page, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.seconds
def test_a_model_runs_only_from_the_copy_that_the_run_recorded(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    recorded = sha256_of(EXAMPLE)
    kept = copy / "sources" / "model" / EXAMPLE.name
    kept.write_text(kept.read_text() + "\nprint('it ran')\n")
    questions = str(run.parent / "questions.jsonl")
    commands = (
        ["generate", str(copy), "--prompt", "the ", "--max-new-tokens", "3"],
        ["eval", str(copy), "--num-processes", "1", "--hellaswag.path", questions],
        ["eval", str(run), "--num-processes", "1", "--tasks", "loss", "--against", str(copy)],
        ["export", str(copy), str(tmp_path / "hf")],
        ["audit", str(copy), "--replay", "4"],
    )
    for command in commands:
        with stopped(1) as errors:
            main(command)
        named = (str(kept), recorded[:16], sha256_of(kept)[:16], f"--init-from {copy}")
        assert all(part in errors.lines[-1] for part in named)
        assert "it ran" not in capsys.readouterr().out
    main(["audit", str(copy)])  # which runs no code
    audited = capsys.readouterr().out
    assert "one trajectory" in audited
    assert str(kept) in audited
    (copy / "journal.jsonl").unlink()
    with refused(ValueError, recorded[:16]):  # which the checkpoint holds as well
        load(copy)
    kept.unlink()
    with refused(ValueError, kept, recorded[:16]):  # though the file is where it was in training
        load(copy)
    words = f"--num-processes 1 --num-steps 1 --workdir {tmp_path / 'new'} --init-from {copy}"
    options = "--model.options.num-layers 2 --model.options.embed-dim 32 --model.max-seq-len 128"
    main(["train", str(EXAMPLE), *words.split(), *options.split(), "--eval.every", "None"])
    load(tmp_path / "new")


@pytest.mark.seconds
def test_a_run_continues_bit_by_bit_and_refuses_another_model(tmp_path):
    source = shutil.copy(EXAMPLE, tmp_path / "mine.py")
    model = dataclasses.replace(OWN, make=f"{source}:make")
    config = own_config(tmp_path, model=model, optimizer=ADAMW)
    train(config, tmp_path / "undisturbed")
    train(dataclasses.replace(config, num_steps=2), tmp_path / "continued")
    moved = shutil.move(source, tmp_path / "tokens")  # where the file lies does not matter
    model = dataclasses.replace(model, make=f"{moved}:make")
    config = dataclasses.replace(config, model=model)
    train(config, tmp_path / "continued")
    assert first_difference(tmp_path / "undisturbed", tmp_path / "continued") is None
    assert len(series(tmp_path / "continued")) == 2 * 4

    half, other = OPTIONS | {"dtype": "bfloat16"}, dataclasses.replace(MODEL, max_seq_len=16)
    for wrong, named in (
        (dataclasses.replace(model, options=half), ["model.options", OPTIONS, half]),
        (dataclasses.replace(model, vocab_size=300), ["model.vocab_size", "257 there", "300 here"]),
        (other, [model, other]),
    ):
        with refused(ValueError, tmp_path / "continued", *named):
            train(dataclasses.replace(config, model=wrong), tmp_path / "continued")
    checkpoint = tmp_path / "continued" / "checkpoints" / "4"
    with refused(ValueError, checkpoint, "ModuleConfig", "GPT2Config"):
        train(
            dataclasses.replace(config, model=MODEL),
            tmp_path / "other",
            init_from=InitFrom(path=str(tmp_path / "continued")),
        )
    kept = tmp_path / "continued" / "sources" / "model" / "mine.py"
    kept.write_text(kept.read_text().replace("1", "2"))
    with refused(ValueError, kept, sha256_of(kept)[:16], sha256_of(Path(moved))[:16]):
        load(tmp_path / "continued")
    train(config, tmp_path / "continued")
    assert kept.read_bytes() == Path(moved).read_bytes()
    with open(moved, "a") as file:
        file.write("\n# another text\n")
    model = dataclasses.replace(model, make=f"{moved}:make")
    more = dataclasses.replace(config, model=model, num_steps=5)
    with refused(ValueError, moved, kept.parents[1], "--resume-overrides model.make"):
        train(more, tmp_path / "continued")
    done = train(more, tmp_path / "continued", resume_overrides=["model.make"])
    assert done.step == 5


PAGE = ROOT / "tools" / "examples" / "your_own_optimizer_model_data.md"


@pytest.fixture(scope="module")
def run_of_the_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    for block in blocks_of(PAGE.read_text()):
        if name := block.said("file"):
            (folder / name).write_text(block.code)
    sizes = "--num-processes 1 --num-steps 40 --eval.every None"
    config = f"{folder / 'mine.py'}:model=mine,data=sums"
    main(["train", config, "--workdir", str(folder / "run"), *sizes.split()])
    return folder / "run"


@pytest.mark.seconds
def test_the_model_of_the_page_generates_the_same_with_its_cache_and_without(
    run_of_the_page, tmp_path, capsys
):
    # The second prompt fills the context of 64 tokens in the middle of the text.
    prompts, trained = ["12+30=", "1+2=3;" * 8], load(run_of_the_page)

    def generated(name, more):
        file = tmp_path / f"{name}.py"
        file.write_text((run_of_the_page.parent / "my_model.py").read_text() + more)
        config = dataclasses.replace(trained.config, make=f"{file}:make")
        model = dataclasses.replace(trained, config=config)
        return generate_texts(model, prompts, max_new_tokens=30, sampling=GREEDY)

    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    main(["generate", str(run_of_the_page), *words, "--max-new-tokens", "30", "--temperature", "0"])
    printed, cached = capsys.readouterr().out, generated("cached", "")
    assert [prompt + text in printed for prompt, text in zip(prompts, cached, strict=True)] == [
        True,
        True,
    ]
    assert cached == generated("whole_rows", "\ndel Convolutions.prefill, Convolutions.decode\n")
    with refused(ZeroDivisionError):
        generated("broken", "\nConvolutions.decode = lambda *arguments: 1 / 0\n")


# --- rematerialisation ----------------------------------------------------------------------------


@pytest.mark.seconds
def test_a_module_has_policies_of_rematerialisation_of_its_own(tmp_path):
    options = OPTIONS | {"num_layers": 8, "embed_dim": 64}
    model = dataclasses.replace(OWN, options=options, max_seq_len=64)
    losses, sizes = [], []
    for remat in ("full", "dots", None):
        config = own_config(tmp_path, model=dataclasses.replace(model, remat=remat))
        step, state = first_state(config)
        _, metrics = step(state, random_batch(step))
        losses.append(metrics["train/grad_norm"])
        sizes.append(peak_bytes(step.lower().compile(), tpu=False))
    np.testing.assert_allclose(losses, losses[-1], rtol=1e-5)
    assert sizes[0] < sizes[1] < sizes[2]


@pytest.mark.seconds
def test_the_policy_of_a_run_is_chosen_written_down_and_kept(tmp_path, capsys):
    config, run = own_config(tmp_path, optimizer=ADAMW), tmp_path / "run"

    def policy_of_run(steps, remat):
        model = dataclasses.replace(OWN, remat=remat)
        train(dataclasses.replace(config, num_steps=steps, model=model), run)
        stored = json.loads((run / "config.json").read_text())
        return stored["model"]["remat"], stored["asked"].get("model.remat")

    assert policy_of_run(1, "full") == ("full", None)
    assert policy_of_run(2, "auto") == ("full", "auto")
    assert policy_of_run(3, "dots") == ("dots", None)
    assert "model.remat full -> dots" in capsys.readouterr().out
    assert load(run).config.remat == "dots"


# --- on a mesh ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        MarsConfig(exact=True),
        SHAMPOO,
        MuonConfig(qkv="heads"),
        sophia(2),
    ],
)
def test_training_on_a_mesh_is_training_on_one_device(tmp_path, optimizer):
    """Newton-Schulz computes in float32 here, as in the tests of the package's own model."""
    if hasattr(optimizer, "ns_dtype"):
        optimizer = dataclasses.replace(optimizer, ns_dtype="float32")
    trainings = []
    for mesh in (MeshConfig(), MeshConfig(data=2, fsdp=2, tensor=2)):
        step, state = first_state(own_config(tmp_path, optimizer=optimizer, mesh=mesh))
        losses = []
        for seed in range(2):
            state, metrics = step(state, random_batch(step, seed))
            losses.append(float(metrics["train/loss"]))
        trainings.append((losses, jax.device_get(state.params)))
    (expected, params), (losses, sharded) = trainings
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    rate = optimizer.learning_rate
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.02 * rate), sharded, params)


@pytest.mark.slow
def test_a_plan_of_it(tmp_path):
    mesh = MeshConfig(data=1, fsdp=4, tensor=1)
    config = own_config(tmp_path, mesh=mesh, optimizer=SHAMPOO)
    plan = make_plan(config, get_topology("cpu:4"), evaluate=False)
    parameters = Parameters(OWN).count
    assert plan.num_parameters == parameters
    norms = 2 * (2 * 32 + 2 * 8) + 32  # which are not split
    assert plan.memory.parameters_bytes == (parameters - norms) + 4 * norms
    assert plan.exchange is not None
    assert plan.flops.model == Parameters(OWN).flops_per_token * config.tokens_per_step


@pytest.mark.slow
@pytest.mark.usefixtures("uncached")
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu (extra `tpu`) is not installed"
)
def test_a_plan_for_a_tpu(tmp_path):
    config = own_config(tmp_path, mesh=MeshConfig(data=1, fsdp=16), optimizer=SHAMPOO)
    plan = make_plan(config, get_topology("v5e:4x4"))
    assert plan.exchange is not None
    assert "all-to-all" in {row.op for row in plan.collectives}


@pytest.mark.slow
def test_two_optimizers_are_compared_on_it(tmp_path, byte_tokens):
    options = """--optimizers adamw mars --seeds 2 --num-steps 1 --global-batch-size 8
        --model.options.embed-dim 32 --model.max-seq-len 16 --eval.num-windows 16"""
    workdir = tmp_path / "compared"
    command = ["compare", f"{EXAMPLE}:data={byte_tokens}", "--workdir", str(workdir)]
    main([*command, "--learning-rates", "1e-3", "3e-3", "--budget", "2", *options.split()])
    assert "parameters" in (workdir / "report.md").read_text()


# --- parameters -----------------------------------------------------------------------------------


def test_the_names_of_the_axes_say_what_a_matrix_is():
    kinds = {
        jax.tree_util.keystr(path, simple=True, separator="."): spec.kind
        for path, spec in jax.tree.leaves_with_path(Parameters(OWN).specs)
    }
    matrices = {f"blocks.{name}" for name in ("qkv", "out", "gate", "up", "down")}
    assert {name for name, kind in kinds.items() if kind == "matrix"} == matrices
    tables = {name for name, kind in kinds.items() if kind == "embedding"}
    assert tables == {"embedding", "lm_head"}
    spec = Parameters(OWN).specs["blocks"]["qkv"]
    assert spec == MatrixSpec(batch=(0,), rows=(1,), cols=(2, 3, 4))
    assert Parameters(OWN).specs["lm_head"].padding == 384 - 257


def test_flops_of_a_head_of_its_own():
    tables, width, layers, length = 384 * 32, 32, 2, 16
    expected = 6 * (Parameters(OWN).count - tables) + 12 * layers * width * length
    assert Parameters(OWN).flops_per_token == expected


def test_packed_documents_are_scored_as_each_alone():
    tokens = np.random.default_rng(0).integers(0, 257, (1, 15)).astype(np.int32)
    segments = np.repeat([0, 1], [6, 9])[None].astype(np.int32)
    positions = np.concatenate([np.arange(6), np.arange(9)])[None].astype(np.int32)
    losses = jax.jit(lambda params, *a, **k: token_losses(make_model(OWN, params), *a, **k)[0])
    params = jax.jit(init_params, static_argnums=0)(OWN, 0)
    packed = losses(params, tokens, segment_ids=segments, positions=positions)
    first, second = (losses(params, part) for part in (tokens[:, :6], tokens[:, 6:]))
    np.testing.assert_allclose(packed[:5], first, rtol=1e-5)
    np.testing.assert_allclose(packed[6:], second, rtol=1e-5)


def test_an_option_of_the_module_is_named_where_it_is_meant():
    with stopped(2, "--model.options.num-layers INT"):
        parse_arguments(ConfigArguments, [str(EXAMPLE), "--model.num-layers", "3"], prog="train")


PLAIN = """
import jax, jax.numpy as jnp
from flax import nnx
from maxmars.distributed.sharding import copies, look_up
from maxmars.optim import MatrixSpec

def param(rngs, *shape, names, **metadata):
    values = 0.1 * jax.random.normal(rngs.params(), shape)
    return nnx.Param(values, out_sharding=names, **metadata)

class Layer(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(0.1), ("embed", None))
        self.mix = nnx.Linear(8, 8, use_bias=False, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return x + jnp.cumsum(jnp.tanh(self.mix(x)), axis=1) / 16

class Plain(nnx.Module):
    '''Tied embeddings, layers in a list.'''

    def __init__(self, rngs, vocab_size):
        self.table = param(rngs, vocab_size, 8, names=("vocab", "embed"))
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])

    @property
    def output_embedding(self):
        return self.table

    def __call__(self, tokens, segment_ids=None, positions=None):
        x = self.table[...][tokens]
        for layer in self.layers:
            x = layer(x)
        return x

def of(kind):
    return lambda *, rngs, vocab_size, max_seq_len: kind(rngs, vocab_size)

make = of(Plain)

class Tied(Plain):
    '''Its input reads the copies of the table that the head uses.'''

    def tables(self):
        return copies(self.table[...])

    def __call__(self, tokens, segment_ids=None, positions=None, tables=None):
        x = look_up(self.tables() if tables is None else tables, tokens)
        for layer in self.layers:
            x = layer(x)
        return x

tied = of(Tied)

class Joined(Plain):
    '''What it computes of a row depends on the other rows of the microbatch.'''

    def __call__(self, tokens, segment_ids=None, positions=None):
        x = super().__call__(tokens)
        x = jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(("data", "fsdp")))
        return x - x.mean(0)

joined = of(Joined)

class LooksAhead(Plain):
    def __call__(self, tokens, segment_ids=None, positions=None):
        x = super().__call__(tokens)
        return x + x.mean(1, keepdims=True)

class FirstCome(Plain):
    '''Tokens take part in the order of the batch, as with experts of limited capacity.'''

    def __call__(self, tokens, segment_ids=None, positions=None):
        x = super().__call__(tokens)
        return x + jnp.cumsum(x.reshape(-1, 8), 0).reshape(x.shape)

looks_ahead, first_come = map(of, (LooksAhead, FirstCome))

# Each of these is wrong in one way.

def needs_more(*, rngs, vocab_size, max_seq_len, width):
    return Plain(rngs, vocab_size)

def refusing(**options):
    raise ValueError("width=7")

def number(**options):
    return 1

def with_parameter(names=None, shape=(8, 8), **metadata):
    def make(*, rngs, vocab_size, max_seq_len):
        model = Plain(rngs, vocab_size)
        model.extra = param(rngs, *shape, names=names, **metadata)
        return model
    return make

unnamed = with_parameter()
unnamed_stack = with_parameter(("embed", "mlp"), (2, 8, 8))
empty = with_parameter(("embed", "mlp"), (8, 0))
unknown_name = with_parameter(("embed", "hidden"))
same_axis = with_parameter(("heads", "mlp"), matrix_spec=None)
no_matrix = with_parameter((None, "mlp"))
spec = MatrixSpec(rows=(0,), cols=(1,))
given_matrix = with_parameter((None, "mlp"), matrix_spec=spec)
given_stack = with_parameter(("layers", None, "mlp"), (2, 8, 8), matrix_spec=spec)

def with_convolution(groups):
    def make(*, rngs, vocab_size, max_seq_len):
        model = Plain(rngs, vocab_size)
        init = nnx.with_partitioning(nnx.initializers.normal(0.1), (None, None, "embed"))
        options = {"use_bias": False, "kernel_init": init, "rngs": rngs}
        model.extra = nnx.Conv(8, 8, (3,), feature_group_count=groups, **options)
        return model
    return make

in_groups = with_convolution(2)
depthwise = with_convolution(8)
given_vector = with_parameter(("embed", "mlp"), matrix_spec=None)

def dropout(*, rngs, vocab_size, max_seq_len):
    model = Plain(rngs, vocab_size)
    model.dropout = nnx.Dropout(0.1, rngs=rngs)
    return model

def array(*, rngs, vocab_size, max_seq_len):
    model = Plain(rngs, vocab_size)
    model.table_of_sines = nnx.data(jnp.sin(jnp.arange(8.0)))
    return model

class Uncallable(nnx.Module):
    pass

class Headless(nnx.Module):
    def __call__(self, tokens, segment_ids=None, positions=None):
        return 1.0 * tokens[..., None]

class Logits(Plain):
    def __call__(self, tokens, segment_ids=None, positions=None):
        return super().__call__(tokens) @ self.table[...].T

class Sums(Plain):
    def __call__(self, tokens, segment_ids=None, positions=None):
        return super().__call__(tokens).sum(1)

class Pair(Plain):
    def __call__(self, tokens, segment_ids=None, positions=None):
        return super().__call__(tokens), None

class WithPolicies(Plain):
    remat_policies = ("dots", "full")

class OnlyPrefill(Plain):
    def prefill(self, tokens, lengths, num_slots):
        return super().__call__(tokens)[:, -1], {"tokens": tokens}

class GrowingCache(OnlyPrefill):
    def decode(self, tokens, positions, cache):
        tokens = jnp.concatenate([cache["tokens"], tokens[:, None]], axis=1)
        return super().__call__(tokens)[:, -1], {"tokens": tokens}

class NoPair(GrowingCache):
    def decode(self, tokens, positions, cache):
        return super().__call__(cache["tokens"])

logits, sums, pair, with_policies = map(of, (Logits, Sums, Pair, WithPolicies))
only_prefill, growing_cache, no_pair = map(of, (OnlyPrefill, GrowingCache, NoPair))

def uncallable(**options):
    return Uncallable()

def headless(**options):
    return Headless()

def small_vocabulary(*, rngs, vocab_size, max_seq_len):
    return Plain(rngs, 100)

def capped(cap):
    def make(*, rngs, vocab_size, max_seq_len):
        model = Plain(rngs, vocab_size)
        model.cap_logits = lambda logits: cap(model, logits)
        return model
    return make

soft_cap = capped(lambda model, logits: jnp.tanh(logits))
cap_of_rows = capped(lambda model, logits: logits.sum(-1))
cap_with_parameter = capped(lambda model, logits: logits * model.table[0, 0])
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "plain.py"
    path.write_text(PLAIN)
    return lambda name: ModuleConfig(make=f"{path}:{name}", vocab_size=257, max_seq_len=16)


@pytest.mark.seconds
def test_a_model_that_joins_rows_is_the_same_on_a_mesh(tmp_path, plain):
    sizes = {"global_batch_size": 16, "num_microbatches": 2, "optimizer": ADAMW}
    losses = []
    for mesh in (MeshConfig(), MeshConfig(data=2, fsdp=2)):
        step, state = first_state(own_config(tmp_path, model=plain("joined"), mesh=mesh, **sizes))
        state, _ = step(state, random_batch(step))
        losses.append(float(step(state, random_batch(step))[1]["train/loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=2e-6)


@pytest.mark.seconds
def test_a_model_that_sees_what_it_is_to_predict_is_refused(tmp_path, plain):
    config = own_config(tmp_path, eval=EvalConfig(every=2, num_windows=16, batch_size=16))
    with refused(ValueError, "looks_ahead"):
        train(dataclasses.replace(config, model=plain("looks_ahead")), tmp_path / "run")
    for name in ("make", "first_come"):
        assert train(dataclasses.replace(config, model=plain(name)), tmp_path / name).done


def test_a_tied_module_has_the_loss_and_gradient_of_one_that_looks_up_by_itself(plain):
    params = init_params(plain("make"), 0)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 257, (2, 9)))

    def loss_and_gradient(config):
        return jax.value_and_grad(lambda p: mean_loss(make_model(config, p), tokens))(params)

    tied, looked_up = loss_and_gradient(plain("tied")), loss_and_gradient(plain("make"))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), tied, looked_up
    )


def test_a_parameter_may_say_itself_what_it_is(plain):
    spec = MatrixSpec(rows=(0,), cols=(1,))
    assert Parameters(plain("given_matrix")).specs["extra"] == spec
    expected = MatrixSpec(batch=(0,), rows=(1,), cols=(2,))
    assert Parameters(plain("given_stack")).specs["extra"] == expected
    assert Parameters(plain("given_vector")).specs["extra"] == MatrixSpec(rows=(), cols=(0, 1))
    assert Parameters(plain("make")).specs["layers"][0]["mix"]["kernel"] == spec
    assert Parameters(plain("make")).axes["table"] == ("vocab", "embed")


def test_a_convolution_in_groups_is_a_vector(plain):
    vector = MatrixSpec(rows=(), cols=(0, 1, 2))
    with pytest.warns(UserWarning, match="extra.kernel"):
        assert Parameters(plain("in_groups")).specs["extra"]["kernel"] == vector
    assert Parameters(plain("depthwise")).specs["extra"]["kernel"] == vector


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("missing", {}, ["'missing'"]),
        ("needs_more", {}, ["'width'", "model.options"]),
        ("refusing", {}, ["width=7"]),
        ("number", {}, ["a int", "flax.nnx.Module"]),
        ("unnamed", {}, ["extra", "[8, 8]", "[]", "out_sharding="]),
        ("unnamed_stack", {}, ["extra", "[2, 8, 8]", "['embed', 'mlp']", "PARTITION_NAME"]),
        ("empty", {}, ["extra", "[8, 0]"]),
        ("unknown_name", {}, ["extra", "'hidden'", "layers, embed"]),
        ("same_axis", {}, ["extra", "['heads', 'mlp']", "tensor"]),
        ("no_matrix", {}, ["extra", "[None, 'mlp']", "MatrixSpec"]),
        ("dropout", {}, ["dropout.rngs.", "nnx.Param"]),
        ("array", {}, ["table_of_sines", "nnx.Param"]),
        ("uncallable", {}, ["'Uncallable'", "not callable"]),
        ("headless", {}, ["'Headless'", "'output_embedding'"]),
        ("logits", {}, ["Logits", "257", "8"]),
        ("sums", {}, ["Sums", "[1, 8]"]),
        ("pair", {}, ["Pair", "tuple"]),
        ("only_prefill", {}, ["'OnlyPrefill'", "'decode'"]),
        ("growing_cache", {}, ["GrowingCache", "decode(", "[1,16]", "[1,17]"]),
        ("no_pair", {}, ["NoPair", "decode("]),
        ("small_vocabulary", {}, ["Plain", "output_embedding", "100", "model.vocab_size=257"]),
        ("cap_of_rows", {}, ["Plain"]),
        ("make", {"remat": "auto"}, ["Plain", "'auto'", "remat_policies"]),
        ("with_policies", {"remat": "ful"}, ["WithPolicies", "'ful'", "dots, full", "auto"]),
        ("cap_with_parameter", {}, ["cap_logits", "Plain"]),
    ],
)
def test_wrong_modules_are_refused_in_one_line(plain, name, changes, named):
    model = dataclasses.replace(plain(name), **changes)
    parameters = Parameters(model, mesh_of())
    with refused(ValueError, *named) as error:
        check_model(parameters)
    assert "\n" not in in_words(error.value)


def test_a_soft_cap_holds_for_logits_and_loss(plain):
    model = plain("soft_cap")
    check_model(Parameters(model, mesh_of()))
    params = jax.tree.map(lambda leaf: 10 * leaf, init_params(model, 0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 257, (2, 9)))
    logits = make_model(model, params)(tokens[:, :-1])
    np.testing.assert_allclose(
        logits, np.tanh(make_model(plain("make"), params)(tokens[:, :-1])), rtol=1e-5
    )
    assert np.abs(logits).max() > 0.7
    losses = token_losses(make_model(model, params), tokens)
    expected = -np.take_along_axis(nnx.log_softmax(logits), tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("logits", {}, ["Logits", "257"]),
        ("make", {"vocab_size": 100}, ["257 (byte)", "model.vocab_size=100"]),
    ],
)
def test_wrong_runs_are_refused_before_anything_is_written(tmp_path, plain, name, changes, named):
    config = own_config(tmp_path, model=dataclasses.replace(plain(name), **changes))
    with refused(ValueError, *named):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_mesh_that_does_not_divide_an_axis_is_refused(plain):
    mesh = mesh_of(data=1, fsdp=1, tensor=2)
    with refused(ValueError, "mesh.tensor=2", "vocab", "table", "[257, 8]"):
        check_model(Parameters(plain("make"), mesh))


def test_a_sequence_longer_than_the_context_is_refused(plain):
    model = make_model(plain("make"), init_params(plain("make"), 0))
    with refused(ValueError, "17 tokens", "model.max_seq_len=16"):
        model(np.zeros((1, 17), np.int32))


def test_names_that_the_trainer_gives_are_no_options():
    with refused(ValueError, "model.options", "rngs"):
        ModuleConfig(make="m.py:make", options={"rngs": 1}, vocab_size=9, max_seq_len=8)
