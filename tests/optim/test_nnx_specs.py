"""What is a matrix in models of Flax's layers, of one's own, and of stacked ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trees
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec
from refusals import refused

from maxmars.optim import MatrixSpec, describe, mars
from maxmars.optim.nnx import matrix_specs_of

RNGS = nnx.Rngs(0)


def spec(batch=0, rows=0, cols=1):
    axes = tuple(range(batch + rows + cols))
    return MatrixSpec(
        batch=axes[:batch], rows=axes[batch : batch + rows], cols=axes[batch + rows :]
    )


def specs_of(model):
    return nnx.to_pure_dict(matrix_specs_of(model))


LAYERS = {
    "linear": (nnx.Linear(4, 6, rngs=RNGS), spec(rows=1), spec()),
    "convolution": (nnx.Conv(3, 6, (2, 5), rngs=RNGS), spec(rows=3), spec()),
    "transposed": (nnx.ConvTranspose(3, 6, (2,), rngs=RNGS), spec(rows=2), spec()),
    "transposed kernel": (
        nnx.ConvTranspose(3, 6, (2,), transpose_kernel=True, rngs=RNGS),
        MatrixSpec(rows=(0, 2), cols=(1,)),
        spec(),
    ),
    "several axes": (
        nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), rngs=RNGS),
        spec(rows=2, cols=2),
        spec(cols=2),
    ),
    "batched": (
        nnx.LinearGeneral(2, 4, batch_axis={0: 3}, rngs=RNGS),
        spec(batch=1, rows=1),
        spec(batch=1),
    ),
    "said otherwise": (
        nnx.Linear(4, 6, kernel_metadata={"matrix_spec": None}, rngs=RNGS),
        spec(cols=2),
        spec(),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_kernels_and_biases_of_layers(name):
    layer, kernel, bias = LAYERS[name]
    assert specs_of(layer) == {"kernel": kernel, "bias": bias}


class Network(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(10, 4, rngs=rngs)
        self.positions = nnx.Param(jnp.ones((3, 4)), matrix_spec=None)
        self.mix = nnx.Param(jnp.ones((4, 4)), matrix_spec=spec(rows=1))
        self.scale = nnx.Param(jnp.ones(4))
        self.layers = nnx.List([nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)])
        self.norm = nnx.LayerNorm(4, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens) @ self.mix[...] * self.scale[...] + self.positions[...]
        return self.norm(self.layers[0](x))


@pytest.mark.smoke
def test_a_network():
    projection = {"kernel": spec(rows=1, cols=2), "bias": spec(cols=2)}
    attention = {name: projection for name in ("query", "key", "value")}
    attention["out"] = {"kernel": spec(rows=2), "bias": spec()}
    assert specs_of(Network(nnx.Rngs(0))) == {
        "table": {"embedding": MatrixSpec(rows=(1,), cols=(0,), embedding=True)},
        "positions": spec(cols=2),
        "mix": spec(rows=1),
        "scale": spec(),
        "layers": {0: attention},
        "norm": {"scale": spec(), "bias": spec()},
    }


class Own(nnx.Module):
    def __init__(self, rngs):
        partition = PartitionSpec("fsdp")
        own = MatrixSpec(rows=(0,), cols=(1, 2), split=(1,), partition=partition)
        self.own = nnx.Param(jnp.ones((2, 3, 4)), matrix_spec=own)
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.RMSNorm(3, rngs=rngs)


def test_layers_stacked_by_vmap():
    @nnx.vmap
    def stack(rngs):
        return Own(rngs)

    assert specs_of(stack(nnx.Rngs(0).split(5))) == {
        "own": MatrixSpec(
            batch=(0,), rows=(1,), cols=(2, 3), split=(2,), partition=PartitionSpec(None, "fsdp")
        ),
        "linear": {"kernel": spec(batch=1, rows=1), "bias": spec(batch=1)},
        "norm": {"scale": spec(batch=1)},
    }


def test_a_dict_of_layers_may_have_keys_that_are_names_of_its_methods():
    class Heads(nnx.Module):
        def __init__(self):
            self.heads = nnx.data({"items": nnx.Linear(4, 6, rngs=RNGS)})

    assert specs_of(Heads())["heads"]["items"]["kernel"] == spec(rows=1)


def test_the_kernel_of_a_convolution_in_groups_is_a_vector_unless_a_spec_says_otherwise():
    @nnx.vmap
    def stack(rngs):
        return nnx.Conv(8, 12, (3,), feature_group_count=4, rngs=rngs)

    with pytest.warns(UserWarning, match="kernel is the kernel of a convolution in 4 groups"):
        assert specs_of(stack(nnx.Rngs(0).split(5))) == {
            "kernel": MatrixSpec(batch=(0,), rows=(), cols=(1, 2, 3)),
            "bias": spec(batch=1),
        }
    own = spec(rows=2)
    said = {"matrix_spec": own}
    layer = nnx.Conv(8, 12, (3,), feature_group_count=4, kernel_metadata=said, rngs=RNGS)
    assert specs_of(layer)["kernel"] == own
    depthwise = nnx.Conv(6, 12, (3,), feature_group_count=6, rngs=RNGS)  # has nothing of a matrix
    assert not specs_of(depthwise)["kernel"].is_matrix
    assert specs_of(nnx.Conv(1, 12, (3,), rngs=RNGS))["kernel"].is_matrix


def test_an_unknown_layer_must_say_what_it_is():
    einsum = nnx.Einsum("ab,bc->ac", (3, 4), rngs=RNGS)
    with refused(ValueError, "0.kernel", "(3, 4)", "Einsum"):
        matrix_specs_of(nnx.List([einsum]))
    einsum.kernel.set_metadata("matrix_spec", spec(rows=1))
    assert specs_of(einsum)["kernel"] == spec(rows=1)


def test_overrides_and_a_fallback_by_path():
    layers = {
        "einsum": nnx.Einsum("ab,bc->ac", (3, 4), rngs=RNGS),
        "table": nnx.Embed(5, 4, rngs=RNGS),
    }
    model = nnx.Dict(layers)
    asked = []

    def fallback(path, array):
        asked.append((path, array.shape))
        return spec(rows=1)

    specs = matrix_specs_of(model, overrides={"table.*": None}, fallback=fallback)
    assert asked == [("einsum.kernel", (3, 4))]
    assert nnx.to_pure_dict(specs) == {
        "einsum": {"kernel": spec(rows=1)},
        "table": {"embedding": spec(cols=2)},
    }
    with refused(ValueError, "heads", "einsum.kernel, table.emb"):
        matrix_specs_of(model, overrides={"heads": None}, fallback=fallback)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Attention:
    """As Equinox's: an array may be called `value`."""

    query: jax.Array
    value: jax.Array


NAMED = {
    "a state of Flax NNX": lambda: nnx.state(nnx.Dict(mix=nnx.Param(jnp.ones((4, 3))))),
    "boxes of Flax Linen": lambda: {"mix": nn.Partitioned(jnp.ones((4, 3)), ("embed", "mlp"))},
    "another library": lambda: Attention(query=jnp.ones((4, 3)), value=jnp.ones((4, 3))),
}


@pytest.mark.parametrize("make", NAMED.values(), ids=NAMED)
def test_a_parameter_has_the_name_that_describe_prints(make):
    tree = make()
    _, *rows = describe(tree).splitlines()
    names = [row.split()[0] for row in rows]
    specs = matrix_specs_of(tree, overrides=dict.fromkeys(names, spec(rows=1)))
    assert jax.tree.leaves(specs) == [spec(rows=1)] * len(names)
    assert names == (["query", "value"] if isinstance(tree, Attention) else ["mix"])


def test_a_tree_of_another_library():
    """Arrays by path: of Flax Linen, of Equinox (whose leaves may be functions), of one's own."""
    params = {
        "Embed_0": {"embedding": jnp.ones((11, 4))},
        "attention": {
            "query": {"kernel": jnp.ones((4, 2, 2)), "bias": jnp.ones((2, 2))},
            "out": {"kernel": jnp.ones((2, 2, 4)), "bias": jnp.ones(4)},
        },
    }
    table = MatrixSpec(rows=(1,), cols=(0,), embedding=True)
    overrides = {
        "Embed_0.embedding": table,
        "*.out.kernel": spec(rows=2),
        "*.kernel": spec(rows=1, cols=2),
        "*.bias": None,
    }
    specs = matrix_specs_of(params, overrides=overrides)
    assert specs == {
        "Embed_0": {"embedding": table},
        "attention": {
            "query": {"kernel": spec(rows=1, cols=2), "bias": spec(cols=2)},
            "out": {"kernel": spec(rows=2), "bias": spec()},
        },
    }
    mars(0.1, variant="shampoo", matrix_specs=specs).init(params)
    with refused(ValueError, "Embed_0.embedding", "(11, 4)"):
        matrix_specs_of(params)
    module = {
        "weight": jnp.ones((3, 6, 4)),
        "activation": jax.nn.relu,
        "steps": 3,
        "bias": jnp.ones(6),
    }
    specs = matrix_specs_of(module, fallback=lambda *_: MatrixSpec(rows=(1,), cols=(0,)))
    assert specs == {
        "weight": MatrixSpec(batch=(0,), rows=(2,), cols=(1,)),
        "activation": None,
        "steps": None,
        "bias": spec(),
    }


@pytest.mark.smoke
def test_the_optimizer_takes_them_and_a_mask_made_of_them():
    """As a tree under `nnx.Optimizer`, and as plain dicts."""
    model = Network(nnx.Rngs(0))
    specs = matrix_specs_of(nnx.eval_shape(lambda: Network(nnx.Rngs(0))))
    decays = jax.tree.map(lambda spec: spec.is_matrix and not spec.embedding, specs)

    def shampoo(specs, decays):
        options = {"variant": "shampoo", "weight_decay": 0.5, "vector_weight_decay": 0.0}
        return mars(0.1, matrix_specs=specs, mask=decays, **options)

    optimizer = nnx.Optimizer(model, shampoo(specs, decays), wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    before = nnx.to_pure_dict(jax.tree.map(jnp.copy, nnx.state(model, nnx.Param)))
    plain = shampoo(nnx.to_pure_dict(specs), nnx.to_pure_dict(decays))
    updates, _ = jax.jit(plain.update)(nnx.to_pure_dict(grads), plain.init(before), before)
    nnx.jit(lambda model, optimizer: optimizer.update(model, grads))(model, optimizer)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    expected = optax.apply_updates(before, updates)
    trees.assert_close(after, expected, 1e-6)
    # A matrix of ones is its own direction, of spectral norm one; AdamW's step of a table is 1.
    np.testing.assert_allclose(updates["mix"], -0.1 * (0.25 + 0.5), rtol=0.3)
    np.testing.assert_allclose(updates["table"]["embedding"], -0.1, rtol=1e-3)
    np.testing.assert_allclose(updates["layers"][0]["query"]["bias"], -0.1, rtol=1e-3)


# --- under nnx.Optimizer, whose init sees Variables and whose update sees arrays ------------------


class TwoLayers(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def loss(model, x):
    return jnp.square(model(x) - x[:, :2]).mean()


def test_exact_mars_beside_a_clone_of_the_model():
    """The clone holds the parameters of the step before, and is not the model."""
    model, tx = TwoLayers(nnx.Rngs(0)), mars(1e-2, exact=True, gamma=0.5)
    optimizer, previous = nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.clone(model)

    def arrays(tree):
        return nnx.to_pure_dict(jax.tree.map(jnp.copy, nnx.state(tree, nnx.Param)))

    @nnx.jit
    def step(model, previous, optimizer, x):
        grads, prev_grads = nnx.grad(loss)(model, x), nnx.grad(loss)(previous, x)
        nnx.update(previous, nnx.state(model))
        optimizer.update(model, grads, prev_grads=prev_grads)
        return nnx.to_pure_dict(grads), nnx.to_pure_dict(prev_grads)

    params, update = arrays(model), jax.jit(tx.update)
    state = tx.init(params)
    for x in np.random.default_rng(0).standard_normal((5, 32, 4)).astype("f"):
        grads, prev_grads = step(model, previous, optimizer, x)
        trees.assert_close(arrays(previous), params)
        updates, state = update(grads, state, params, prev_grads=prev_grads)
        params = optax.apply_updates(params, updates)
        trees.assert_close(arrays(model), params, 1e-6)
