"""Loading and exporting models. Hugging Face's own logits of our exports, of the first of two rows,
are frozen in `tests/model/transformers_logits.npz`; `pytest tests/eval/test_trained_model.py -m
peers --update-goldens` renews them."""

import contextlib
import dataclasses
import json
import resource
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from damage import flip
from hf_models import (
    BASE,
    BYTES,
    TOKENS,
    VARIANTS,
    hf_arrays,
    hf_fields,
    logits,
    make_run,
    plain_hf_logits,
    random_params,
    read_hf,
    write_hf,
)
from refusals import refused, stopped
from safetensors.numpy import load_file, save_file
from trees import mesh_of

from maxmars import cli
from maxmars.checkpoint import read
from maxmars.config import MeshConfig
from maxmars.data.formats import open_directory
from maxmars.data.tokenizer import ByteTokenizer
from maxmars.distributed.sharding import make_mesh
from maxmars.eval import load
from maxmars.eval.generate import GREEDY, generate_tokens
from maxmars.eval.trained_model import export_model
from maxmars.model.parameters import Parameters

PARAMS = {step: random_params(BYTES, step) for step in (2, 4)}  # of `run`


def assert_same(params, expected):
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.seconds
def test_a_run_and_one_of_its_checkpoints_on_a_mesh(run):
    mesh = mesh_of(fsdp=8)
    for inside, step in (("", 4), ("checkpoints/2", 2)):
        model = load(f"{run}/{inside}", mesh=mesh)
        assert (model.config, model.tokenizer.name) == (BYTES, "byte")
        assert (model.name, model.origin) == (f"own, step {step}", f"{run}/checkpoints/{step}")
        assert_same(model.params, PARAMS[step])
    expected = Parameters(model.config, mesh).shardings
    assert jax.tree.map(lambda x: x.sharding, model.params) == expected
    ours = load(run).model(jax.numpy.asarray(TOKENS))
    np.testing.assert_allclose(ours[..., :257], logits(BYTES, PARAMS[4]), rtol=0, atol=1e-5)


def test_gpt2s_tokenizer_serves_a_model_of_its_size_with_padding(tmp_path, tiktoken_cache, capsys):
    padded = dataclasses.replace(BASE, vocab_size=50304, num_layers=1)
    write_hf(tmp_path / "padded", hf_fields(padded), hf_arrays(padded))
    model = load(tmp_path / "padded")
    assert "GPT-2's tokenizer" in capsys.readouterr().err
    assert (model.tokenizer.name, model.config.vocab_size) == ("gpt2", 50304)


@pytest.fixture(scope="module")
def around(run):
    """The directory with the run, runs that lack something, and models of Hugging Face."""
    folder, one = run.parent, {1: random_params(BASE)}
    (folder / "new" / "checkpoints").mkdir(parents=True)
    make_run(folder / "bare", BASE, one, None)
    make_run(folder / "nonsense", BASE, one, None)
    (folder / "nonsense" / "tokenizer").mkdir()
    (folder / "nonsense" / "tokenizer" / "tokenizer_config.json").write_text("null")
    make_run(folder / "anothers", BASE, one, ByteTokenizer())
    assert read(folder / "anothers" / "checkpoints").config.model == BASE
    write_hf(folder / "bytes", hf_fields(BYTES), hf_arrays(BYTES))
    large = hf_arrays(BYTES)
    large["h.1.ln_1.bias"][3] = 7e4
    write_hf(folder / "large", hf_fields(BYTES), large)
    return folder


def on_tensor_8(path):
    return load(path, mesh=mesh_of(tensor=8))


def half(path):
    return export_model(path, path.parent / "half", dtype="float16")


@pytest.mark.parametrize(
    ("call", "name", "kind", "named"),
    [
        (load, "missing", FileNotFoundError, ["hf:OWNER/NAME"]),
        (load, "own/checkpoints/3", FileNotFoundError, ["hf:OWNER/NAME"]),
        (load, "", ValueError, ["model.safetensors"]),
        (load, "own/tokenizer/tokenizer.json", ValueError, ["model.safetensors"]),
        (load, "new", FileNotFoundError, ["checkpoint.every"]),
        (load, "bytes", FileNotFoundError, ["tokenizer.json"]),
        (load, "bare", FileNotFoundError, ["bare/tokenizer", "GrainConfig"]),
        (load, "nonsense", ValueError, ["nonsense/tokenizer/tokenizer_config.json"]),
        (load, "anothers", ValueError, ["anothers/tokenizer", "257 tokens", "61"]),
        (on_tensor_8, "own", ValueError, ["tensor=8", "model.num_heads=2"]),
        (half, "large", ValueError, ["h.1.ln_1.bias", "7e+04", "float16"]),
    ],
)
def test_refusals(around, call, name, kind, named):
    before = sorted(around.iterdir())
    with refused(kind, *named):
        call(around / name)
    assert sorted(around.iterdir()) == before


# --- export

FROZEN = Path(__file__).parents[1] / "model" / "transformers_logits.npz"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Export of each variant, made once."""
    directory, made = tmp_path_factory.mktemp("variants"), {}

    def export(kind):
        if kind not in made:
            config = VARIANTS[kind]
            run = make_run(directory / kind, config, {1: random_params(config)}, None)
            made[kind] = directory / f"{kind}-hf"
            several = {"max_file_bytes": 20_000} if kind == "inverse_scaled" else {}
            result = export_model(run, made[kind], **several)
            assert "Tokenizer" in result.notes[0]
        return made[kind]

    return export


@pytest.mark.smoke
@pytest.mark.parametrize("kind", VARIANTS)
def test_logits_are_those_of_transformers(exported, kind):
    config, frozen = VARIANTS[kind], np.load(FROZEN)[kind]
    ours = logits(config, random_params(config))
    np.testing.assert_allclose(ours[0], frozen, rtol=0, atol=1e-4)
    fields, arrays = read_hf(exported(kind))
    assert arrays.keys() == hf_arrays(BASE).keys()
    assert arrays["wte.weight"].shape == (61, 16)
    theirs = plain_hf_logits(fields, arrays, TOKENS[0])
    np.testing.assert_allclose(theirs, frozen, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["bias_free", "padded"])
def test_an_export_is_read_and_exported_again_bit_by_bit(exported, tmp_path, kind):
    config, params = VARIANTS[kind], random_params(VARIANTS[kind])
    shutil.copytree(exported(kind), tmp_path / "hf")
    # These models have no tokenizer: any that fits is good enough.
    vocabulary = {chr(ord("A") + i): i for i in range(60)} | {"<|endoftext|>": 60}
    (tmp_path / "hf" / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "hf" / "merges.txt").write_text("#version: 0.2\n")
    model = load(tmp_path / "hf", mesh=mesh_of())
    assert (model.config, model.name) == (config, "hf")
    assert model.tokenizer.eot == 60
    embedding = np.asarray(model.params["wte"]["embedding"])
    assert not embedding[61:].any()  # padding is not exported
    embedding = np.concatenate([embedding[:61], params["wte"]["embedding"][61:]])
    assert_same(model.params | {"wte": {"embedding": embedding}}, params)
    export_model(tmp_path / "hf", tmp_path / "again")
    first, second = (tmp_path / name / "model.safetensors" for name in ("hf", "again"))
    assert first.read_bytes() == second.read_bytes()


def test_files_of_an_export(run, tmp_path):
    left = tmp_path / ".hf.partial"  # by an export that was killed
    left.mkdir()
    (left / "model-00001-of-00009.safetensors").write_bytes(b"half")
    result = export_model(run / "checkpoints" / "2", tmp_path / "hf")
    assert (result.name, result.num_files, result.notes) == ("own, step 2", 1, [])
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert len({path.stat().st_mode for path in (tmp_path / "hf").iterdir()}) == 1
    assert not left.exists()
    fields = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert fields | hf_fields(BYTES) == fields
    assert (fields["architectures"], fields["dtype"]) == (["GPT2LMHeadModel"], "float32")
    assert (fields["bos_token_id"], fields["eos_token_id"]) == (256, 256)
    again = load(tmp_path / "hf", mesh=make_mesh(MeshConfig(tensor=2)))
    assert (again.name, again.tokenizer.name) == ("hf", "byte")
    assert again.config.padded_vocab_size == 258  # tensor=2 does not divide 257
    embedding = np.asarray(again.params["wte"]["embedding"])[:257]
    assert_same(again.params | {"wte": {"embedding": embedding}}, PARAMS[2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_several_files_in_another_type(run, tmp_path, dtype):
    result = export_model(run, tmp_path / "hf", dtype=dtype, max_file_bytes=10_000)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    count = len(files)
    assert result.num_files == count > 2
    assert files[0].name == f"model-00001-of-{count:05}.safetensors"
    assert all(path.stat().st_size < 15_000 for path in files)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == result.num_bytes
    assert index["weight_map"].keys() == {f"transformer.{name}" for name in hf_arrays(BYTES)}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == dtype
    kind = jax.numpy.dtype(dtype)
    loaded = load(tmp_path / "hf", mesh=mesh_of())
    assert_same(loaded.params, jax.tree.map(lambda x: x.astype(kind).astype("f"), PARAMS[4]))


@pytest.mark.seconds
def test_the_newest_sound_checkpoint_is_exported(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    largest = max((tmp_path / "run/checkpoints/4").rglob("*"), key=lambda path: path.stat().st_size)
    flip(largest)
    assert export_model(tmp_path / "run", tmp_path / "hf").name == "run, step 2"
    assert_same(load(tmp_path / "hf", mesh=mesh_of()).params, PARAMS[2])
    with refused(ValueError, tmp_path / "run/checkpoints", "step 4"):
        export_model(tmp_path / "run/checkpoints/4", tmp_path / "other")


def made_tokenizer():
    """A tokenizer of our own making, in which no file names the end of a text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<unk>", "</s>", "<turn>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(["to be or not to be that is the question"], trainer)
    return tokenizer


@pytest.mark.seconds
def test_a_model_ends_where_its_files_say_in_every_command(tmp_path, capsys):
    theirs, hf, again = made_tokenizer(), tmp_path / "hf", tmp_path / "again"
    config = dataclasses.replace(BASE, vocab_size=theirs.get_vocab_size())
    write_hf(hf, hf_fields(config), hf_arrays(config))
    theirs.save(str(hf / "tokenizer.json"))
    with stopped(1, "eos_token in a tokenizer_config.json"):
        cli.main(["generate", str(hf), "--prompt", "to be"])
    (hf / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    model = load(hf)
    prompt = [model.tokenizer.encode("to be")]
    (free,) = generate_tokens(model, prompt, max_new_tokens=12, sampling=GREEDY)
    length = next(i for i in range(1, 12) if free[i] not in [1, *free[:i]])
    ends = {"eos_token_id": [int(free[length]), 1]}
    (hf / "generation_config.json").write_text(json.dumps(ends))
    (hf / "config.json").write_text(json.dumps(hf_fields(config) | {"eos_token_id": 0}))

    def ended(target):
        options = ["--prompt", "to be", "--temperature", "0", "--max-new-tokens", "12", "--json"]
        cli.main(["generate", str(target), *options])
        row = json.loads(capsys.readouterr().out.splitlines()[-1])
        return row["end"], row["num_tokens"]

    assert ended(hf) == ("end_of_text", length)
    cli.main(["export", str(hf), str(again)])
    capsys.readouterr()
    assert ended(again) == ("end_of_text", length)
    fields = {path.stem: json.loads(path.read_text()) for path in again.glob("*.json")}
    assert fields["tokenizer_config"]["eos_token"] == "</s>"
    assert fields["config"]["eos_token_id"] == 1
    assert fields["generation_config"]["eos_token_id"] == [1, int(free[length])]

    (tmp_path / "a.txt").write_text("to be or not to be " * 50)
    words = ["--tokenizer", str(hf / "tokenizer.json"), "--workers", "0"]
    cli.main(["data", "prepare", str(tmp_path / "a.txt"), str(tmp_path / "tokens"), *words])
    stream = open_directory(tmp_path / "tokens").stream("train")
    assert stream.read(stream.num_tokens - 1, 1).tolist() == [1]


@pytest.mark.seconds
def test_what_a_tokenizers_files_say_goes_out_as_it_came_in(tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs, hf = made_tokenizer(), tmp_path / "hf"
    theirs.add_special_tokens(["<s>", "<pad>", "<mask>"])
    names = {"bos_token": "<s>", "pad_token": "<pad>", "mask_token": "<mask>", "unk_token": "<unk>"}
    came = transformers.PreTrainedTokenizerFast(
        tokenizer_object=theirs, eos_token="</s>", padding_side="left", **names
    )
    came.chat_template = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    config = dataclasses.replace(BASE, vocab_size=theirs.get_vocab_size())
    write_hf(hf, hf_fields(config), hf_arrays(config))
    came.save_pretrained(hf)
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 500)
    words = ["--tokenizer", str(hf), "--workers", "0"]
    cli.main(["data", "prepare", str(tmp_path / "a.txt"), str(tmp_path / "tokens"), *words])
    train = ["--num-processes", "1", "--num-steps", "1", "--model.num-layers", "1"]
    train += ["--model.embed-dim", "32", "--model.max-seq-len", "16", "--eval.every", "None"]
    run, start = tmp_path / "run", f"quickstart:data={tmp_path / 'tokens'}"
    cli.main(["train", start, *train, "--workdir", str(run)])
    cli.main(["export", str(run), str(tmp_path / "of_run")])
    cli.main(["export", str(hf), str(tmp_path / "of_hf")])
    went = [tmp_path / name for name in ("tokens", "run/tokenizer", "of_run", "of_hf")]
    for place in went:
        out = transformers.AutoTokenizer.from_pretrained(place)
        assert out.special_tokens_map == came.special_tokens_map
        assert out.padding_side == "left"
        assert out.chat_template == came.chat_template
        for text in ("to be or not", "<s>to be<mask>"):
            assert out(text)["input_ids"] == came(text)["input_ids"]
    for place in went[2:]:
        for name in ("config.json", "generation_config.json"):
            fields = json.loads((place / name).read_text())
            ids = came.bos_token_id, came.eos_token_id
            assert (fields["bos_token_id"], fields["eos_token_id"]) == ids
    # Here every text of training came after the end of another one.
    assert (load(hf).start, load(run).start) == ids


def test_a_special_token_after_the_models_rows_is_never_needed(tmp_path, capsys):
    theirs, hf = made_tokenizer(), tmp_path / "hf"
    config = dataclasses.replace(BASE, vocab_size=theirs.get_vocab_size(), vocab_pad_multiple=64)
    write_hf(hf, hf_fields(config), hf_arrays(config))
    (hf / "tokenizer_config.json").write_text('{"eos_token": "</s>", "pad_token": "[PAD]"}')
    theirs.add_special_tokens(["[PAD]"])
    theirs.save(str(hf / "tokenizer.json"))
    options = ["--prompt", "to be [PAD]", "--max-new-tokens", "30", "--temperature", "50"]
    cli.main(["generate", str(hf), *options])
    assert "[PAD]" not in capsys.readouterr().out.partition("[PAD]")[2]
    theirs.add_tokens(["question"])  # which texts become
    theirs.save(str(hf / "tokenizer.json"))
    with refused(ValueError, hf, config.vocab_size):
        load(hf)


@contextlib.contextmanager
def full_disk():
    """No file gets longer than 8 kB."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_errors_are_one_line_and_leave_nothing(run, around, tmp_path):
    def ends(value, *arguments):
        before = sorted(tmp_path.iterdir())
        with stopped(1, value) as errors:
            cli.main([*map(str, arguments)])
        assert len(errors.lines) == 1
        assert sorted(tmp_path.iterdir()) == before

    out = tmp_path / "out"
    ends(str(tmp_path), "export", run, tmp_path)  # which exists
    ends("gs://bucket/out", "export", run, "gs://bucket/out")
    with full_disk():
        ends("model.safetensors", "export", run, out)
    diverged = shutil.copytree(around / "bytes", tmp_path / "diverged")
    arrays = load_file(diverged / "model.safetensors")
    arrays["h.1.ln_1.bias"][3] = np.nan
    save_file(arrays, diverged / "model.safetensors")
    shutil.copytree(run / "tokenizer", diverged, dirs_exist_ok=True)
    ends("h.1.ln_1.bias", "generate", diverged, "--prompt", "a")
    (diverged / "model.safetensors").rename(diverged / "pytorch_model.bin")
    ends("pickle", "export", diverged, out)


@pytest.mark.peers
@pytest.mark.parametrize("kind", VARIANTS)
def test_transformers_loads_an_export(exported, tmp_path, kind, request):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config, params = VARIANTS[kind], random_params(VARIANTS[kind])
    model, info = transformers.GPT2LMHeadModel.from_pretrained(
        exported(kind), output_loading_info=True
    )
    assert not any(info.values())
    with torch.no_grad():
        theirs = model.eval()(torch.tensor(TOKENS, dtype=torch.int64)).logits.numpy()
    np.testing.assert_allclose(logits(config, params), theirs, rtol=0, atol=1e-4)
    if request.config.getoption("--update-goldens"):
        known = dict(np.load(FROZEN)) if FROZEN.exists() else {}
        np.savez_compressed(FROZEN, **(known | {kind: theirs[0]}))
    np.testing.assert_allclose(np.load(FROZEN)[kind], theirs[0], rtol=0, atol=1e-5)
    # What it saves is read back, and is still the same.
    model.save_pretrained(tmp_path / "saved")
    _, arrays = read_hf(exported(kind))
    _, saved = read_hf(tmp_path / "saved")
    assert saved.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(saved[name], array)
