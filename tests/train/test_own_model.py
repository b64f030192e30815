"""Models of the user's own: trained, continued, evaluated, planned, and refused in one line."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_chips import for_tpus
from flax import nnx
from hellaswag_questions import write_questions_file
from markdown_pages import blocks_of
from plain_scores import plain_scorer
from refusals import refused, stopped
from safetensors.numpy import load_file
from tiny import ADAMW, MODEL, first_state, random_batch, short_config
from trees import mesh_of

from maxmars.cli import main
from maxmars.cli.parse import ConfigArguments, parse_arguments
from maxmars.config import (
    CheckpointConfig,
    EvalConfig,
    MarsConfig,
    MeshConfig,
    ModuleConfig,
    ScheduleConfig,
)
from maxmars.config.errors import in_words
from maxmars.eval import load
from maxmars.eval.generate import GREEDY, generate_texts, generate_tokens
from maxmars.eval.hellaswag import METRICS, HellaSwag, load_questions
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


def test_questions_are_scored_as_by_the_run_and_as_each_ending_alone(run, trained):
    questions = load_questions(run.parent / "questions.jsonl")
    scorer = HellaSwag(trained.config, trained.mesh, trained.tokenizer, questions)
    scores = scorer(trained.params)
    lines = {key: value for line in read_metrics(run) for key, value in line.items()}
    for protocol, name in METRICS.items():
        assert scores[protocol].summary()["acc_norm"] == lines[f"eval/{name}_acc_norm"]
    score, encode = plain_scorer(trained.config, trained.params), trained.tokenizer.encode
    expected = [
        [score(encode(q.context), encode(f" {ending}"))[0] for ending in q.endings]
        for q in questions
    ]
    np.testing.assert_allclose(scores["completion"].log_likelihoods, expected, rtol=2e-5)


@pytest.mark.seconds
def test_continuations_share_a_row_where_the_module_takes_their_numbers(run_of_the_page):
    model = load(run_of_the_page)
    choices = [encode_choices("a b", [" c", " d"], model.tokenizer)]
    assert len(pack_choices(choices, OWN).rows) == 1
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


@pytest.mark.seconds
def test_export_refuses_a_module_that_does_not_say_it(run_of_the_page, tmp_path):
    where = run_of_the_page / "checkpoints" / "10"
    with refused(ValueError, where, "my_model.py:make", "GPT-2"):
        export_model(run_of_the_page, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_refuses_another_model(run, tmp_path):
    other = dataclasses.replace(OWN, options=OPTIONS | {"dtype": "bfloat16"}, vocab_size=300)
    named = ["model.options", other.options, OPTIONS, "model.vocab_size", "257 there", "300 here"]
    with refused(ValueError, run, *named):
        train(own_config(tmp_path, model=other), run)
    with refused(ValueError, run / "checkpoints" / "4", "ModuleConfig", "GPT2Config"):
        start = InitFrom(path=str(run))
        train(own_config(tmp_path, model=MODEL), tmp_path / "other", init_from=start)


PAGE = ROOT / "tools" / "examples" / "your_own_optimizer_model_data.md"


@pytest.fixture(scope="module")
def run_of_the_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    for block in blocks_of(PAGE.read_text()):
        if name := block.said("file"):
            (folder / name).write_text(block.code)
    sizes = "--num-processes 1 --num-steps 10 --eval.every None"
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
    assert all(prompt + text in printed for prompt, text in zip(prompts, cached, strict=True))
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
        compiled = step.lower().compile()
        _, metrics = compiled(state, random_batch(step))
        losses.append(metrics["train/grad_norm"])
        sizes.append(peak_bytes(compiled, tpu=False))
    np.testing.assert_allclose(losses, losses[-1], rtol=1e-5)
    assert sizes[0] < sizes[1] < sizes[2]


# --- on a mesh ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_on_a_mesh_is_training_on_one_device(tmp_path):
    """Newton-Schulz computes in float32 here, as in the tests of the package's own model."""
    optimizer = dataclasses.replace(SHAMPOO, exact=True, qkv="heads", ns_dtype="float32")
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


@for_tpus
def test_a_plan_for_a_tpu(tmp_path):
    config = own_config(tmp_path, mesh=MeshConfig(data=1, fsdp=16), optimizer=SHAMPOO)
    plan = make_plan(config, get_topology("v5e:4x4"))
    assert plan.exchange is not None
    assert "all-to-all" in {row.op for row in plan.collectives}


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
    assert Parameters(OWN).remat_policies == (None, "dots", "full")
    tables, width, layers, length = 384 * 32, 32, 2, 16
    expected = 6 * (Parameters(OWN).count - tables) + 12 * layers * width * length
    assert Parameters(OWN).flops_per_token == expected


@pytest.mark.seconds
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
import functools
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

def returning(change, **more):
    def call(self, tokens, segment_ids=None, positions=None):
        return change(self, Plain.__call__(self, tokens))
    return of(type("Changed", (Plain,), {"__call__": call, **more}))

def rows_on_mesh(x):
    return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(("data", "fsdp")))

# What it computes of a row depends on the other rows of the microbatch.
joined = returning(lambda self, x: rows_on_mesh(x) - rows_on_mesh(x).mean(0))
looks_ahead = returning(lambda self, x: x + x.mean(1, keepdims=True))
# Tokens take part in the order of the batch, as with experts of limited capacity.
first_come = returning(lambda self, x: x + jnp.cumsum(x.reshape(-1, 8), 0).reshape(x.shape))
with_methods = functools.partial(returning, lambda self, x: x)
soft_cap = with_methods(cap_logits=lambda self, logits: jnp.tanh(logits))

def with_part(part):
    def make(*, rngs, vocab_size, max_seq_len):
        model = Plain(rngs, vocab_size)
        model.extra = part(rngs)
        return model
    return make

def parameter(names=None, shape=(8, 8), **metadata):
    return with_part(lambda rngs: param(rngs, *shape, names=names, **metadata))

def convolution(groups):
    init = nnx.with_partitioning(nnx.initializers.normal(0.1), (None, None, "embed"))
    options = {"use_bias": False, "kernel_init": init, "feature_group_count": groups}
    return with_part(lambda rngs: nnx.Conv(8, 8, (3,), rngs=rngs, **options))

spec = MatrixSpec(rows=(0,), cols=(1,))
given_matrix = parameter((None, "mlp"), matrix_spec=spec)
given_stack = parameter(("layers", None, "mlp"), (2, 8, 8), matrix_spec=spec)
given_vector = parameter(("embed", "mlp"), matrix_spec=None)
in_groups, depthwise = convolution(2), convolution(8)

class Headless(nnx.Module):
    def __call__(self, tokens, segment_ids=None, positions=None):
        return 1.0 * tokens[..., None]

def prefill(self, tokens, lengths, num_slots):
    return self(tokens)[:, -1], {"tokens": tokens}

def growing(self, tokens, positions, cache):
    tokens = jnp.concatenate([cache["tokens"], tokens[:, None]], axis=1)
    return self(tokens)[:, -1], {"tokens": tokens}
"""
# What `make` is in a file, wrong in one way, and what its refusal names.
WRONG = {
    "lambda *, rngs, vocab_size, max_seq_len, width: 1": ["'width'", "model.options"],
    "lambda **options: int('width=7')": ["width=7"],
    "lambda **options: 1": ["a int", "flax.nnx.Module"],
    "parameter()": ["extra", "[8, 8]", "[]", "out_sharding="],
    "parameter(('embed', 'mlp'), (2, 8, 8))": ["[2, 8, 8]", "['embed', 'mlp']", "PARTITION_NAME"],
    "parameter(('embed', 'mlp'), (8, 0))": ["extra", "[8, 0]"],
    "parameter(('embed', 'hidden'))": ["extra", "'hidden'", "layers, embed"],
    "parameter(('heads', 'mlp'), matrix_spec=None)": ["extra", "['heads', 'mlp']", "tensor"],
    "parameter((None, 'mlp'))": ["extra", "[None, 'mlp']", "MatrixSpec"],
    "with_part(lambda rngs: nnx.Dropout(0.1, rngs=rngs))": ["extra.rngs.", "nnx.Param"],
    "with_part(lambda rngs: nnx.data(jnp.arange(8.0)))": ["extra", "nnx.Param"],
    "lambda **options: nnx.Module()": ["'Module'", "not callable"],
    "lambda **options: Headless()": ["'Headless'", "'output_embedding'"],
    "lambda *, rngs, **options: Plain(rngs, 100)": ["Plain", "output_embedding", "100", "257"],
    "returning(lambda self, x: x @ self.table[...].T)": ["Changed", "257", "8"],
    "returning(lambda self, x: x.sum(1))": ["Changed", "[1, 8]"],
    "returning(lambda self, x: (x, None))": ["Changed", "tuple"],
    "with_methods(prefill=prefill)": ["'Changed'", "'decode'"],
    "with_methods(prefill=prefill, decode=growing)": ["Changed", "decode(", "[1,16]", "[1,17]"],
    "with_methods(prefill=prefill, decode=lambda self, x, *_: self(x))": ["Changed", "decode("],
    "with_methods(cap_logits=lambda self, x: x.sum(-1))": ["Changed"],
    "with_methods(cap_logits=lambda self, x: x * self.table[0, 0])": ["cap_logits", "Changed"],
}


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


@pytest.mark.seconds
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


@pytest.mark.parametrize("make", WRONG)
def test_wrong_modules_are_refused_in_one_line(tmp_path, make):
    path = tmp_path / "wrong.py"
    path.write_text(f"{PLAIN}\nmake = {make}\n")
    model = ModuleConfig(make=f"{path}:make", vocab_size=257, max_seq_len=16)
    with refused(ValueError, *WRONG[make]) as error:
        check_model(Parameters(model, mesh_of()))
    assert "\n" not in in_words(error.value)


def test_a_policy_that_the_module_lacks_is_refused(plain):
    for model, named in (
        (dataclasses.replace(plain("make"), remat="auto"), ["Plain", "'auto'", "remat_policies"]),
        (dataclasses.replace(OWN, remat="ful"), ["Decoder", "'ful'", "dots, full", "auto"]),
    ):
        with refused(ValueError, *named):
            check_model(Parameters(model, mesh_of()))


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
        ("of", {}, ["plain.py:of", "'rngs'"]),
        ("make", {"vocab_size": 100}, ["257 (byte)", "model.vocab_size=100"]),
    ],
)
def test_wrong_runs_are_refused_before_anything_is_written(tmp_path, plain, name, changes, named):
    config = own_config(tmp_path, model=dataclasses.replace(plain(name), **changes))
    with refused(ValueError, *named):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_mesh_that_does_not_divide_an_axis_is_refused(plain):
    with refused(ValueError, "mesh.tensor=2", "vocab", "table", "[257, 8]"):
        check_model(Parameters(plain("make"), mesh_of(tensor=2)))


def test_a_sequence_longer_than_the_context_is_refused(plain):
    model = make_model(plain("make"), init_params(plain("make"), 0))
    with refused(ValueError, "17 tokens", "model.max_seq_len=16"):
        model(np.zeros((1, 17), np.int32))


def test_names_that_the_trainer_gives_are_no_options():
    with refused(ValueError, "model.options", "rngs"):
        ModuleConfig(make="m.py:make", options={"rngs": 1}, vocab_size=9, max_seq_len=8)
