"""What optax asks of contributed optimizers and of its own under sharding, asked of all of ours.

The checks are those of `optax/contrib/_common_test.py` and `optax/_src/sharding_test.py`.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import pydoc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import trees
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from refusals import refused

import maxmars.optim
from maxmars.optim import (
    MatrixSpec,
    WeightUpdate,
    clip_by_matrix_norm,
    correct_gradient,
    descend,
    mars,
    mars_over,
    momentum_kernel,
    moonlight,
    muon,
    scale_by_adam_of,
    scale_by_mars,
    scale_by_orthogonalization,
    scale_by_soap,
    soap,
)
from maxmars.plan.collectives import collectives


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """An optimizer with its options, and the argument of `update` that takes another gradient."""

    factory: object
    options: dict = dataclasses.field(default_factory=dict)
    second_gradient: str | None = None

    def __call__(self, learning_rate=0.01, **options):
        return self.factory(learning_rate, **self.options, **options)

    @functools.cached_property
    def default(self):
        """The same object for all tests: what one of them compiles, the others have."""
        return self()

    def extra(self, gradient):
        return {} if self.second_gradient is None else {self.second_gradient: gradient}


def mars_nadam(learning_rate, *, weight_decay=0.0, matrix_specs=None, mesh=None):
    """MARS over an optimizer that is not ours."""
    del mesh  # all of it is elementwise, or a norm
    inner = optax.nadamw(learning_rate, weight_decay=weight_decay)
    return mars_over(inner, b1=0.9, matrix_specs=matrix_specs)


def adam_floor(learning_rate, *, weight_decay=0.0, matrix_specs=None, mesh=None):
    """An optimizer that is not ours, with every change of the update that goes together."""
    del mesh  # all of it is elementwise, or a norm
    changes = WeightUpdate(
        floor=1e-3, cautious_decay=True, coupled_decay=optax.constant_schedule(1)
    )
    tail = descend(learning_rate, weight_decay, weight_update=changes, matrix_specs=matrix_specs)
    return mars_over(optax.chain(optax.scale_by_adam(), tail), matrix_specs=matrix_specs)


KERNEL = momentum_kernel(
    (0.9, lambda count: jnp.where(count < 1, 0.9, 0.95)), (0.5, 0.4), 0.1, debias=True
)
EFFICIENT = {"variant": "shampoo", "memory_efficient": True, "clip_threshold": None}
CASES = {
    "mars adamw": Case(mars),
    "mars adamw exact": Case(mars, {"exact": True}, "prev_grads"),
    "mars adamw amsgrad": Case(mars, {"amsgrad": True}),
    "mars lion": Case(mars, {"variant": "lion"}),
    "mars shampoo": Case(mars, {"variant": "shampoo"}),
    "mars shampoo memory-efficient": Case(mars, EFFICIENT),
    "mars m": Case(mars, {"variant": "m"}),
    "mars over nadam": Case(mars_nadam),
    "muon": Case(muon),
    "moonlight": Case(moonlight),
    "soap": Case(soap),
    "normuon": Case(muon, {"row_normalization": 0.95}),
    "muon hyperball": Case(
        muon, {"weight_update": WeightUpdate(hyperball=True, kinds=("matrix", "embedding"))}
    ),
    "adam floor": Case(adam_floor),
    "muon with a kernel": Case(muon, {"momentum_kernel": KERNEL}),
    "mars adamw with a kernel": Case(mars, {"momentum_kernel": KERNEL}),
    "soap with a kernel": Case(soap, {"momentum_kernel": KERNEL}),
}


# The smoke tests of cases: Newton-Schulz of whole matrices, and a second gradient.
TYPED = {"mars shampoo": pytest.mark.smoke, "mars adamw exact": pytest.mark.smoke}


def ask(*names):
    cases = [pytest.param(CASES[name], id=name, marks=TYPED.get(name, ())) for name in names]
    return pytest.mark.parametrize("case", cases)


# What shares its code with another finds its minima, and is asked no more.
SIMILAR = {
    "mars adamw amsgrad",
    "mars lion",
    "mars shampoo memory-efficient",
    "mars m",
    "mars over nadam",
    "muon",
    "moonlight",
    "mars adamw with a kernel",
    "soap with a kernel",
}
every_kind = ask(*(name for name in CASES if name not in SIMILAR))


FUNCTIONS = [
    name
    for name in maxmars.optim.__all__
    if callable(getattr(maxmars.optim, name)) and not isinstance(getattr(maxmars.optim, name), type)
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_begins_with_the_arguments_of_the_function(name):
    page = pydoc.plain(pydoc.render_doc(getattr(maxmars.optim, name)))
    assert page.splitlines()[2].startswith(f"{name}(")


def params_like(dtype=jnp.float32, seed=0):
    """A matrix, a vector, a scalar, an absent parameter and an empty subtree."""
    rng = np.random.default_rng(seed)
    return {
        "kernel": jnp.asarray(rng.standard_normal((4, 3)), dtype),
        "bias": jnp.asarray(rng.standard_normal(3), dtype),
        "temperature": jnp.asarray(rng.standard_normal(), dtype),
        "absent": None,
        "empty": {},
    }


def update(case, tx, grads, state, params):
    return jax.jit(tx.update)(grads, state, params, **case.extra(grads))


assert_close = functools.partial(trees.assert_close, rtol=1e-5, atol=1e-6)


def types(tree):
    return jax.tree.map(lambda x: jax.typeof(x).str_short(), tree)


def all_finite(tree):
    return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(tree))


# --- convergence ---------------------------------------------------------------------------------


def valley(x):
    """Rosenbrock's function over the first axis."""
    return jnp.sum(jnp.square(1 - x[0]) + 100 * jnp.square(x[1] - x[0] ** 2))


BOWL = {
    "vector": jnp.asarray([1.0, -1.0, 1.0]),
    "matrix": jnp.asarray([[3.0, -2.0], [1.0, 4.0]]),
    "scalar": jnp.asarray(-2.0),
}


def bowl_loss(params, target):
    return sum(jnp.square(params[name] - target[name]).sum() for name in target)


def minimize(case, tx, loss, params, steps):
    """Parameters after so many steps, and the loss."""
    gradient = jax.grad(loss)

    def step(carry, _):
        params, previous, state = carry
        grads = gradient(params)
        extra = case.extra(grads)
        if "prev_grads" in extra:
            extra = {"prev_grads": gradient(previous)}
        updates, state = tx.update(grads, state, params, **extra)
        return (optax.apply_updates(params, updates), params, state), None

    @jax.jit
    def run(params):
        return jax.lax.scan(step, (params, params, tx.init(params)), length=steps)[0][0]

    return run(params)


@ask(*(name for name in CASES if name != "muon hyperball"))  # no norm changes under it
def test_it_finds_the_minima_of_a_parabola_and_of_rosenbrocks_function(case):
    steps = 4000
    target = BOWL | {"valley": jnp.ones(2), "two valleys": jnp.ones((2, 2))}

    def loss(params):
        bowl = bowl_loss(params, BOWL)
        return bowl + valley(params["valley"]) + valley(params["two valleys"])

    tx = case(optax.cosine_decay_schedule(0.05, steps))
    minimum = minimize(case, tx, loss, jax.tree.map(jnp.zeros_like, target), steps)
    assert_close(minimum, target, rtol=0, atol=3e-2)


# --- states --------------------------------------------------------------------------------------


@every_kind
def test_the_state_is_an_ordinary_tree(case):
    """It may be made from shapes, flattened and mapped over; `jit` changes nothing."""
    tx, params = case.default, params_like()
    for dtype in ("float16", "bfloat16", "float32"):
        some = params_like(dtype)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), some)
        state = tx.init(some)
        assert types(jax.eval_shape(tx.init, some)) == types(state)
        assert types(tx.init(shapes)) == types(state)  # as optax has it: zeros, from shapes alone
        for grads in (some, params_like("bfloat16")):
            after = jax.eval_shape(tx.update, grads, state, some, **case.extra(grads))
            assert types(after) == types((some, state))
    assert_close(jax.jit(tx.init)(params), tx.init(params), atol=0)
    with refused(ValueError, "`params`"):  # it may decay them
        tx.update(params, tx.init(params), **case.extra(params))

    state = tx.init(params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    for _ in range(2):  # SOAP's first step is none
        updates, state = update(case, tx, zeros, state, params)
        assert not any(x.any() for x in jax.tree.leaves(updates))  # nothing decays unasked

    _, state = update(case, tx, params_like(seed=1), tx.init(params), params)
    expected = update(case, tx, params, state, params)
    assert_close(tx.update(params, state, params, **case.extra(params)), expected)
    leaves, treedef = jax.tree.flatten(state)
    copy = jax.tree.unflatten(treedef, [np.asarray(x) for x in leaves])
    mapped = optax.tree.map_params(tx, jnp.negative, state)
    restored = optax.tree.map_params(tx, jnp.negative, mapped)
    assert any((a != b).any() for a, b in zip(leaves, jax.tree.leaves(mapped), strict=True))
    for other in (copy, restored):
        assert_close(update(case, tx, params, other, params), expected, rtol=0, atol=0)


NARROW = {"mu_dtype": "bfloat16", "last_grad_dtype": "bfloat16", "amsgrad": True}
ONE_SIDE = {"max_precondition_dim": 128}
LAYERS = MatrixSpec(batch=(0,), rows=(1,), cols=(2,))
BYTES = [
    (mars, {}, (64, 64), "float32", 3 * 4),
    (mars, {"last_grad_dtype": "bfloat16"}, (64, 64), "float32", 2 * 4 + 2),
    (mars, {"exact": True}, (64, 64), "float32", 2 * 4),
    (mars, {"gamma": 0.0}, (64, 64), "float32", 2 * 4),
    (mars, {"variant": "m"}, (64, 64), "float32", 2 * 4),
    (mars, EFFICIENT, (64, 64), "float32", 4),
    (mars, NARROW, (64, 64), "bfloat16", 4 * 2),
    (mars, NARROW, (64, 64), "float16", 2 * 2 + 2 * 4),  # where squares of gradients are zero
    # SOAP's Gram matrices and bases of both sides are in float32.
    (soap, {}, (64, 64), "float32", 2 * 4 + 2 * 2 * 4),
    (soap, {"mu_dtype": "bfloat16"}, (64, 64), "float32", 2 + 4 + 16),
    (soap, {"mu_dtype": "bfloat16"}, (64, 64), "bfloat16", 2 + 2 + 16),
    (soap, {"mu_dtype": "bfloat16"}, (64, 64), "float16", 2 + 4 + 16),
    (soap, {"matrix_specs": LAYERS}, (7, 64, 64), "float32", 8 + 16),
    (soap, ONE_SIDE, (64, 256), "float32", 8 + 2 * 4 * 64 / 256),
    (soap, ONE_SIDE, (256, 512), "float32", 8),
    (soap, {}, (50304, 768), "float32", 8 + 2 * 4 * 768 / 50304),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("make", "options", "shape", "dtype", "expected"), BYTES)
def test_bytes_of_the_state_for_each_parameter(make, options, shape, dtype, expected):
    tx, param = make(0.1, **options), jax.ShapeDtypeStruct(shape, dtype)
    state = jax.eval_shape(tx.init, param)
    arrays = [x for x in jax.tree.leaves(state) if x.size > 1]
    found = sum(x.size * x.dtype.itemsize for x in arrays) / param.size
    assert found == pytest.approx(expected)
    extra = {"prev_grads": param} if "exact" in options else {}
    assert jax.eval_shape(tx.update, param, state, param, **extra) == (param, state)


@every_kind
def test_a_branch_and_a_loop_keep_the_types(case):
    tx, params = case.default, params_like("float16")
    zeros = jax.tree.map(jnp.zeros_like, params)

    def step(carry, now):
        params, state, updates = carry
        active, scale = now
        grads = jax.tree.map(lambda x: x * scale.astype(x.dtype), params)
        # Types that differ between the branches, or from the carry's, are errors.
        updates, state = jax.lax.cond(
            active,
            lambda: tx.update(grads, state, params, **case.extra(grads)),
            lambda: (updates, state),
        )
        return (optax.apply_updates(params, updates), state, updates), None

    carry = (params, tx.init(params), zeros)
    # Zero gradients first: 1e-8 is zero in float16, and 0 / 0 is not a number.
    now = (jnp.asarray([True, False, True, True]), jnp.asarray([0.0, 1.0, 1.0, 1.0]))
    after, _ = jax.jit(lambda carry: jax.lax.scan(step, carry, now))(carry)
    assert types(after) == types(carry)
    assert all_finite(after)
    for name in ("kernel", "bias", "temperature"):
        assert not np.array_equal(after[0][name], params[name])


@every_kind
def test_parameters_may_be_missing_empty_or_a_lone_scalar(case):
    tx = case.default
    for empty in ({}, (), {"a": None}):
        updates, state = tx.update(empty, tx.init(empty), empty, **case.extra(empty))
        assert updates == empty
        assert types(state) == types(tx.init(empty))

    scalar = jnp.float32(2.0)
    after = jax.eval_shape(tx.update, scalar, tx.init(scalar), scalar, **case.extra(scalar))
    assert types(after) == types((scalar, tx.init(scalar)))

    params = {"rows": jnp.zeros((0, 4)), "cols": jnp.zeros((4, 0)), "none": jnp.zeros(0)}
    params["some"] = jnp.ones((4, 2))
    state = tx.init(params)
    for _ in range(2):
        updates, state = update(case, tx, params, state, params)
    assert types(updates) == types(params)
    assert all_finite((updates, state))
    assert updates["some"].any()


@every_kind
def test_it_takes_unknown_arguments_and_donations_and_compiles_once(case):
    # A donated buffer that cannot be used is a warning, and so an error here.
    tx, params = case.default, params_like()
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, unknown=1, **case.extra(grads))
        return optax.apply_updates(params, updates), state

    for seed in range(1, 4):
        # What a step does not read, such as the share that the last one clipped, is not passed.
        arrays = [x for x in jax.tree.leaves((params, state)) if x.ndim]
        params, state = step(params, state, params_like(seed=seed))
        assert all(x.is_deleted() for x in arrays)
    assert step._cache_size() == 1


@every_kind
def test_constants_schedules_and_injected_hyperparameters_are_the_same(case):
    # Integers become traced hyperparameters too: Newton-Schulz then loops.
    params, rate = params_like(), {"learning_rate": 0.03, "weight_decay": 0.03}
    schedules = {name: optax.constant_schedule(value) for name, value in rate.items()}
    inject = optax.inject_hyperparams(case.factory)
    results, states = [], []
    for tx in (case(**rate), case(**schedules), inject(**rate, **case.options)):
        state = jax.jit(tx.init)(params)
        for seed in (1, 2):
            updates, state = update(case, tx, params_like(seed=seed), state, params)
        results.append(updates)
        states.append(state)
    constant, _, injected = states
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])
    assert_close(injected.inner_state, constant, atol=1e-5)
    injected.hyperparams["learning_rate"] = jnp.asarray(0.0)
    updates, _ = update(case, tx, params, injected, params)
    assert not updates["kernel"].any()


DIRECTIONS = {
    "correction": (correct_gradient, {}),
    "clip": (clip_by_matrix_norm, {}),
    "one buffer": (momentum_kernel, {"decays": (0.9,), "weights": (0.9,), "gradient_weight": 0.1}),
    "momentum kernel": (
        momentum_kernel,
        {"decays": (0.9, 0.99), "weights": (1.0, 2.0), "debias": True},
    ),
    "adam of a kernel": (scale_by_adam_of, {"momentum": KERNEL}),
    "orthogonalization": (scale_by_orthogonalization, {}),
    "mars over lion": (mars_over, {"inner": optax.scale_by_lion()}),
    "mars": (scale_by_mars, {}),
    "descent": (descend, {"learning_rate": 0.1, "weight_update": WeightUpdate(hyperball=True)}),
    "soap": (scale_by_soap, {}),
}


# One vector [2, 8, 4], said to be one: nothing is to be warned of.
VECTOR = {"matrix_specs": MatrixSpec(rows=(), cols=(0, 1, 2))}

EXPORTED = [getattr(maxmars.optim, name) for name in maxmars.optim.__all__]


def test_annotations_are_types_as_optax_compares_them():
    """Its test of schedules skips what is not annotated by `optax.ScalarOrSchedule` itself."""
    signatures = [inspect.signature(x) for x in EXPORTED if callable(x)]
    annotations = [p.annotation for s in signatures for p in s.parameters.values()]
    assert not any(isinstance(annotation, str) for annotation in annotations)
    rates = [
        s.parameters[name] for s in signatures for name in s.parameters if name == "learning_rate"
    ]
    assert len(rates) >= 4
    assert all(rate.annotation in (optax.ScalarOrSchedule, optax.Schedule) for rate in rates)


def test_no_optimizer_is_missing_here():
    optimizers = {
        x
        for x in EXPORTED
        if callable(x) and "GradientTransformation" in str(inspect.signature(x).return_annotation)
    }
    tested = {case.factory for case in CASES.values()} | {x for x, _ in DIRECTIONS.values()}
    assert len(optimizers) >= 11
    assert optimizers <= tested


OPTIMIZERS = {"a whole optimizer": (mars, {"learning_rate": 0.1, "variant": "shampoo"})}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("factory", "options"), (DIRECTIONS | OPTIMIZERS).values(), ids=DIRECTIONS | OPTIMIZERS
)
def test_types_and_shardings_are_kept_without_parameters_too(factory, options):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    takes_specs = "matrix_specs" in inspect.signature(factory).parameters
    tx = factory(**options, **(VECTOR if takes_specs else {}))
    with jax.set_mesh(mesh):
        params = jnp.ones((2, 8, 4), jnp.float16, out_sharding=PartitionSpec(None, "x"))
        state = tx.init(params)
        assert types(jax.eval_shape(tx.init, params)) == types(state)
        assert types(jax.jit(tx.init)(params)) == types(state)
        after = jax.jit(tx.update)(params, state, params)
        assert types(after) == types((params, state))
        if factory not in (mars, descend):  # which need parameters
            assert_close(jax.jit(tx.update)(params, state), after, atol=0)


@pytest.mark.smoke
def test_the_parts_of_mars_calculate_in_float32():
    large = {"w": jnp.full((4, 4), 300.0, jnp.float16)}  # its square is infinite in float16
    clip = clip_by_matrix_norm(1.0)
    clipped, state = clip.update(large, clip.init(large))
    assert types(clipped) == types(large)
    np.testing.assert_allclose(clipped["w"], np.full((4, 4), 0.25))
    assert state.clip_fraction == 1
    grads = {"w": jnp.ones((4, 4))}
    ema = momentum_kernel((0.95,), (0.95,), 0.05, accumulator_dtype="bfloat16")
    state = ema.init(grads)
    m, after = ema.update(grads, state)
    assert (types(m), types(after)) == (types(grads), types(state))
    np.testing.assert_allclose(m["w"], np.full((4, 4), 0.05 + 0.95 * 0.05), rtol=1e-6)
    first, second = (params_like("bfloat16", seed)["kernel"] for seed in (1, 2))
    correction = correct_gradient(0.95, 0.025)
    state = correction.update(first, correction.init(first))[1]
    corrected, after = jax.jit(correction.update)(second, state)  # rounded once
    exact = second + np.float32(0.475) * (second.astype("f") - first.astype("f"))
    np.testing.assert_array_equal(corrected, exact.astype("bfloat16"))
    assert types(after) == types(state)


@every_kind
def test_in_float16_it_moves_as_far_as_in_float32(case):
    """The square of a gradient of 1e-4 is zero in float16."""
    tx = case.default

    def moved(dtype):
        params = params_like(dtype)
        state, length = tx.init(params), 0.0
        for seed in range(1, 9):
            grads = jax.tree.map(lambda g: 1e-4 * g, params_like(dtype, seed))
            updates, state = update(case, tx, grads, state, params)
            length += jnp.linalg.norm(updates["kernel"].astype("f"))
        return length

    np.testing.assert_allclose(moved("float16"), moved("float32"), rtol=0.05)


@ask("mars adamw exact", "muon", "soap")
def test_without_jit_it_compiles_nothing_after_its_first_steps(case):
    params = {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}
    tx = case()
    state, compiled = tx.init(params), []

    def listen(event, duration_s, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(step)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for step in range(5):
            if step == 0:
                jax.jit(lambda x: x)(0)  # what others compiled is not compiled again; this is
            _, state = tx.update(params, state, params, **case.extra(params))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert 0 in compiled
    assert max(compiled) < 3


LAYER = {"square": (6, 6), "fused": (6, 2, 8), "norm": (5,)}
# Of the heads and their width the columns are more than SOAP's limit here: of a matrix that has no
# gradient in some directions, bases are not unique.
OF_SOAP = {"precondition_frequency": 2, "max_precondition_dim": 12}


@ask("mars adamw", "soap", "muon with a kernel", "normuon", "muon hyperball")
def test_a_stack_of_layers_equals_separate_parameters(x64, case):
    def tx(batch):
        specs = {
            name: MatrixSpec(
                batch=(0,) if batch else (),
                rows=(batch,) if name != "norm" else (),
                cols=tuple(range(batch + (name != "norm"), batch + len(shape))),
            )
            for name, shape in LAYER.items()
        }
        options = OF_SOAP if case.factory is soap else {"ns_dtype": "float64"}
        return case(0.01, weight_decay=0.1, matrix_specs=specs, **options)

    # Layers whose sizes differ, so that some gradients are clipped and others are not.
    params, *gradients = [
        [
            trees.random_tree(10 * t + i, LAYER, scale=10.0 ** (3 * i - 3), dtype="f8")
            for i in range(3)
        ]
        for t in range(8)
    ]
    together = trees.take_steps(tx(1), trees.stack(params), [*map(trees.stack, gradients)])
    alone = tx(0)  # one for all layers, so that its program is compiled once
    apart = [
        trees.take_steps(alone, layer, [layers[i] for layers in gradients]).params[-1]
        for i, layer in enumerate(params)
    ]
    assert_close(together.params[-1], trees.stack(apart), rtol=1e-9, atol=1e-12)


# --- wrappers ------------------------------------------------------------------------------------


@every_kind
def test_masked_and_partitioned_it_acts_on_its_share_alone(case):
    params = params_like()
    labels = {"kernel": "ours", "bias": "ours", "temperature": "rest", "absent": None, "empty": {}}

    def is_matrix(tree):
        return jax.tree.map(lambda x: x.ndim == 2, tree)

    tx = case.default
    masked = optax.masked(tx, is_matrix, mask_compatible_extra_args=True)
    wrapped = optax.partition(
        {"ours": masked, "rest": optax.set_to_zero()}, labels, mask_compatible_extra_args=True
    )
    share = {"kernel": params["kernel"]}
    state, wrapped_state = tx.init(share), wrapped.init(params)
    start = types(wrapped_state)
    for seed in (1, 2):
        grads = params_like(seed=seed)
        expected, state = update(case, tx, {"kernel": grads["kernel"]}, state, share)
        updates, wrapped_state = update(case, wrapped, grads, wrapped_state, params)
        assert_close({"kernel": updates["kernel"]}, expected)
        assert updates["kernel"].any() or case.factory is soap  # its first step changes nothing
        np.testing.assert_array_equal(updates["bias"], grads["bias"])
        assert not updates["temperature"]
    assert types(wrapped_state) == start


# --- meshes --------------------------------------------------------------------------------------

PARTITIONS = {
    "c_attn": PartitionSpec(None, "fsdp", None, "tensor"),
    "mlp": PartitionSpec(None, ("tensor", "fsdp")),
    "table": PartitionSpec("tensor", "fsdp"),
    "norm": PartitionSpec("fsdp"),
}
SPECS = {
    "c_attn": MatrixSpec(
        batch=(0,), rows=(1,), cols=(2, 3, 4), split=(2,), partition=PARTITIONS["c_attn"]
    ),
    "mlp": MatrixSpec(batch=(0,), rows=(1,), cols=(2,), partition=PARTITIONS["mlp"]),
    "table": MatrixSpec(rows=(0,), cols=(1,), partition=PARTITIONS["table"], embedding=True),
    "norm": None,
}
SHAPES = {"c_attn": (2, 8, 3, 2, 4), "mlp": (3, 16, 6), "table": (8, 16), "norm": (8,)}
ROWS = 2 * 3 * 8 + 3 * 6  # outputs of the matrices that are orthogonalised
# Meshes of SOAP and of Newton-Schulz alone: test_soap_on_mesh.py, test_orthogonalize.py.
MESHES = ((2, 2, 2), (1, 8, 1), (1, 4, 2))
ON_MESHES = [name for name in CASES if name not in SIMILAR | {"soap"}]
PAIRS = [
    pytest.param(name, shape, marks=TYPED.get(name, ()))
    for name, shape in zip(ON_MESHES, itertools.cycle(MESHES))
]


def count_in_place(tree, mesh):
    """Check that each leaf of parameters and of their states lies like its parameter, and count
    them; an axis over which a state sums is not cut."""
    count = 0
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = getattr(path[-1], "key", None)
        if name in SHAPES and x.ndim == len(SHAPES[name]):
            axes = zip(x.shape, PARTITIONS[name], strict=False)
            wanted = PartitionSpec(*(cut if size > 1 else None for size, cut in axes))
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, wanted), x.ndim), path
            count += 1
    return count


@pytest.mark.parametrize(("name", "shape"), PAIRS)
def test_a_mesh_changes_nothing_and_gathers_no_matrix(x64, name, shape):
    case, mesh = CASES[name], trees.mesh_of(*shape)
    options = {} if case.factory is adam_floor else {"ns_dtype": "float64"}

    def trained(mesh):
        tx = case(weight_decay=0.1, matrix_specs=SPECS, mesh=mesh, **options)
        params, *grads = (
            trees.put(trees.random_tree(i, SHAPES, dtype="float64"), mesh, PARTITIONS)
            for i in range(5)
        )
        return tx, trees.take_steps(tx, params, grads, extra=case.extra(grads[::-1]))

    (_, expected), (tx, found) = trained(None), trained(mesh)
    params, state = found.params[-1], found.state
    assert_close((found.params, state), (expected.params, expected.state), rtol=1e-11, atol=1e-12)
    assert count_in_place((params, state), mesh) >= 2 * len(SHAPES)
    update = jax.jit(tx.update).lower(params, state, params, **case.extra(params))
    moved = collectives(update.compile(), mesh)
    others = sum(collective.bytes for collective in moved if collective.op != "all-to-all")
    assert others <= 8 * (ROWS * ("row_normalization" in case.options) + 40), others


@pytest.mark.smoke
@ask(*ON_MESHES)
def test_on_explicit_axes_init_and_update_keep_the_types(case):
    """Types of arrays on Explicit axes contain their shardings."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        params = trees.put(trees.random_tree(0, SHAPES), mesh, PARTITIONS)
        tx = case(matrix_specs=SPECS, mesh=mesh)
        state = tx.init(params)
        assert count_in_place(state, mesh) >= len(SHAPES)
        assert types(jax.eval_shape(tx.init, params)) == types(state)
        after = jax.eval_shape(tx.update, params, state, params, **case.extra(params))
        assert types(after) == types((params, state))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "mesh_is_given", "in_context"),
    [("mars shampoo", True, True), ("mars shampoo", False, False), ("soap", False, False)],
)
def test_explicit_axes_say_the_partition_and_the_mesh(name, mesh_is_given, in_context):
    """As the type of a traced array has them, a `MatrixSpec` and an optimizer may do without."""
    case, mesh = CASES[name], jax.make_mesh((4, 2), ("fsdp", "tensor"))
    local = trees.random_tree(0, {name: SHAPES[name] for name in ("mlp", "norm")})
    bare = {"mlp": dataclasses.replace(SPECS["mlp"], partition=None), "norm": None}
    # Else rounding flips signs, and decides on bases for a side of which gradients have not all.
    options = {"eps": 1e-2} | ({"max_precondition_dim": 8} if name == "soap" else {})

    def updates_of(params, mesh):
        tx = case(matrix_specs=bare, mesh=mesh, **options)
        state, run = tx.init(params), jax.jit(tx.update)
        for _ in range(2):  # SOAP's first step is none
            updates, state = jax.block_until_ready(run(params, state, params))
        return updates

    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        params = trees.put(local, mesh, PARTITIONS)
        updates = updates_of(params, mesh if mesh_is_given else None)
        assert types(updates) == types(params)
    expected = updates_of(local, None)
    assert_close(jax.tree.map(np.asarray, updates), expected, rtol=2e-2, atol=1e-4)
