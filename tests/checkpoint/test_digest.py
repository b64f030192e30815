"""Digests: equal on every mesh, different after any change, and what the formula says they are."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from refusals import refused
from trees import mesh_of

from maxmars.checkpoint.digest import (
    combine,
    digest,
    from_plain,
    leaf_paths,
    leaf_sums,
    leaf_types,
    to_plain,
)
from maxmars.plan.collectives import collectives, total_bytes

pytestmark = pytest.mark.smoke


def reference(x):
    """The formula of the module's docstring in plain numpy, with 64-bit integers cut to 32."""
    low = 0xFFFFFFFF

    def mix(v, shifts_and_factors):
        s1, f1, s2, f2, s3 = shifts_and_factors
        v = (v ^ (v >> s1)) * f1 & low
        v = (v ^ (v >> s2)) * f2 & low
        return v ^ (v >> s3)

    x = np.asarray(x)
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}[x.dtype.itemsize]
    words = np.frombuffer(x.tobytes(), unsigned)
    words = words.reshape((*x.shape, 2) if x.dtype.itemsize == 8 else x.shape)
    words = words.astype(np.uint64)
    sums = []
    for seed, constants in (
        (0x243F6A88, (16, 0x7FEB352D, 15, 0x846CA68B, 16)),
        (0x85A308D3, (15, 0xD168AAAD, 15, 0xAF723597, 15)),
    ):
        index = np.full(words.shape, seed, np.uint64)
        for d, i in enumerate(np.indices(words.shape, np.uint64)):
            index = (index + mix((i + seed + (d + 1) * 0x9E3779B9) & low, constants)) & low
        mixed = mix(words ^ mix(index, constants), constants)
        sums.append(int(mixed.sum()) & low)
    return f"{sums[0]:08x}{sums[1]:08x}"


def bits(shape, dtype):
    """Random bits, so NaNs with payloads, infinities and denormals too."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(0).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return (raw[..., 0] > 127) if dtype.kind == "b" else raw.view(dtype)[..., 0]


DTYPES = [
    "float32", "bfloat16", "float16", "float8_e4m3fn", "bool",
    "int8", "uint8", "int16", "uint16", "int32", "uint32",
]  # fmt: skip


def test_agrees_with_the_numpy_reference():
    tree = {dtype: jnp.asarray(bits((2, 3, 5), jnp.dtype(dtype))) for dtype in DTYPES}
    tree |= {str(len(s)): jnp.asarray(bits(s, jnp.dtype("bfloat16"))) for s in [(), (5,), (3, 4)]}
    assert digest(tree) == {name: reference(x) for name, x in tree.items()}


@pytest.mark.gpu
def test_an_accelerator_gives_the_digests_of_the_numpy_reference():
    tree = {dtype: jnp.asarray(bits((3, 700, 50), jnp.dtype(dtype))) for dtype in DTYPES}
    assert digest(tree) == {dtype: reference(x) for dtype, x in tree.items()}


def test_64_bit_types_are_two_words(x64):
    tree = {dtype: jnp.asarray(bits((3, 5), dtype)) for dtype in ("float64", "int64")}
    tree["scalar"] = jnp.asarray(bits((), "uint64"))
    assert [x.dtype.itemsize for x in tree.values()] == [8, 8, 8]
    assert digest(tree) == {name: reference(x) for name, x in tree.items()}


def test_scalars_and_empty_arrays():
    scalars = {"i": np.int32(3), "b": np.bool_(True), "f": np.float32(0.5)}
    tree = {name: x.item() for name, x in scalars.items()} | {"n": scalars["f"]}
    expected = {name: reference(x) for name, x in scalars.items()}
    expected |= {"n": expected["f"], "e": "0" * 16}
    assert digest(tree | {"e": jnp.zeros((0, 4)), "": None}) == expected  # None is no leaf
    assert digest({}) == {}


@pytest.mark.parametrize(
    ("sizes", "spec"),
    [
        ((8, 1, 1), P()),
        ((1, 8, 1), P("fsdp", None, None)),
        ((2, 2, 2), P("data", "tensor", "fsdp")),
        ((2, 2, 2), P(("data", "fsdp", "tensor"), None, None)),
    ],
)
def test_does_not_depend_on_the_mesh(sizes, spec):
    x = jnp.asarray(bits((8, 8, 16), "float32"))
    mesh = mesh_of(*sizes)
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    assert digest([sharded, jnp.int32(7)]) == digest([x, jnp.int32(7)])


def test_any_flipped_bit_changes_both_sums():
    x = bits((3, 4), "uint32")
    plain = digest([x])["0"]
    for bit in range(32):
        changed = x.copy()
        changed[1, 2] ^= np.uint32(1 << bit)
        other = digest([changed])["0"]
        assert other[:8] != plain[:8]
        assert other[8:] != plain[8:]


def test_moved_values_sizes_and_signs_change_both_sums():
    x = jax.random.normal(jax.random.key(0), (2, 4, 4))
    moved = [
        x,
        x[::-1],  # layers
        x[:, ::-1],  # rows
        x[:, :, jnp.array([1, 0, 2, 3])],  # two columns
        x.swapaxes(1, 2),
        x.at[0, 1].set(x[1, 0]).at[1, 0].set(x[0, 1]),  # two rows of two layers
        -x,
    ]
    constant = [jnp.zeros((4, 4)), jnp.zeros((4, 5)), -jnp.zeros((4, 4)), jnp.zeros(16)]
    digests = [*digest([*moved, *constant]).values()]
    for half in (slice(8), slice(8, 16)):
        assert len({digest[half] for digest in digests}) == len(moved) + len(constant)


class Pair(NamedTuple):
    left: jax.Array
    right: jax.Array


def test_paths_name_keys_fields_and_indices():
    x = jnp.arange(3)
    nested = {"params": Pair(x, (x, [x]))}
    assert leaf_paths(nested) == ["params/left", "params/right/0", "params/right/1/0"]
    plain = {"params": {"left": x, "right": {"0": x, "1": {"0": x}}}}
    assert digest(nested) == digest(plain)
    assert jax.tree.structure(to_plain(nested)) == jax.tree.structure(plain)
    assert jax.tree.structure(from_plain(plain, nested)) == jax.tree.structure(nested)
    types = {"a": jnp.zeros((2, 3), jnp.bfloat16), "b": jax.ShapeDtypeStruct((), jnp.int32)}
    assert leaf_types(types) == {"a": "bfloat16[2,3]", "b": "int32[]"}


def test_rejects_what_it_cannot_name_or_digest():
    with refused(ValueError, "'a/1'"):
        digest({"a": {"1": 0}, "a/1": 0})
    with refused(ValueError, "'k'", "key<fry>", "jax.random.key_data"):
        digest({"k": jax.random.key(0)})
    with refused(ValueError, "'c'", "complex64"):
        digest({"c": 1j * jnp.ones(2)})


def test_combine_covers_every_leaf_and_no_order():
    digests = {"a": "0" * 16, "b": "1" * 16}
    assert len(combine(digests)) == 64
    assert combine(dict(reversed(digests.items()))) == combine(digests)
    assert combine({"a": "1" * 16, "b": "0" * 16}) != combine(digests)
    assert combine({"a": "0" * 16}) != combine(digests)


def test_second_call_compiles_nothing(caplog):
    mesh = mesh_of(fsdp=8)
    x = jax.device_put(jnp.zeros((8, 11, 13)), NamedSharding(mesh, P("fsdp")))
    first, other = digest({"x": x}), x + 1
    with jax.log_compiles(), caplog.at_level("WARNING"):
        assert digest({"x": other}) != first
    assert "Compiling" not in caplog.text


@pytest.mark.parametrize("spec", [P(), P(("fsdp", "tensor"))])
def test_needs_no_memory_and_moves_no_arrays(spec):
    mesh = mesh_of(fsdp=4, tensor=2)
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32, sharding=NamedSharding(mesh, spec))
    sums = jax.jit(leaf_sums, out_shardings=NamedSharding(mesh, P()))
    compiled = sums.lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 10_000
    moved = total_bytes(collectives(compiled, mesh))
    assert moved < 1_000
