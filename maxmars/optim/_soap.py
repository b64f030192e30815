r"""SOAP (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's preconditioner.

One step of a matrix, with gradient G_t [rows, cols]:

    G'_t = Q_Lᵀ G_t Q_R                                 into the eigenbases
    m_t = β₁ m_{t−1} + (1 − β₁) G'_t
    v_t = β₂ v_{t−1} + (1 − β₂) G'_t²
    U_t = Q_L ( (m_t / (1 − β₁ᵗ)) √(1 − β₂ᵗ) / (√v_t + ε) ) Q_Rᵀ
    P_t = P_{t−1} − η (U_t + λ P_{t−1})
    L_t = β L_{t−1} + (1 − β) G_t G_tᵀ,    R_t = β R_{t−1} + (1 − β) G_tᵀ G_t

Every k steps follows one power iteration of each basis: the columns of Q are sorted by the
estimated eigenvalues diag(Qᵀ L Q), largest first, v along with them; then Q ← qr(L Q), and m is
rotated into the new basis. A side longer than `max_precondition_dim` keeps the identity; with both
it is Adam.

Where this follows the official code: the first gradient only sets L and R and their eigenvectors,
and changes neither parameters, m nor v (t counts from the second gradient on); L and R are updated
after the step, which so never uses the present gradient's own basis; ε is not bias-corrected; m is
kept in the eigenbases. Where it does not: each axis of a tensor was a side of its own there, here
it is the two of its `MatrixSpec`; vectors and embeddings take AdamW from the first gradient on; the
decay reads the parameters before the step.

Where a Gram matrix has equal eigenvalues (a first G with fewer columns than rows leaves many zeros)
any basis of their space is right. Which one comes out depends on rounding, and so do the updates.

On a mesh, a matrix cannot be preconditioned in pieces, so whole matrices have owners. The devices
that cut a leaf's matrices divide its stack instead: every device sends its pieces of the gradients
to the owners in one joint all-to-all, owners do everything else for whole matrices, and the pieces
of the update go back in one all-to-all. A lone matrix has one owner. Axes that cut the stack need
no transfers, and along axes that hold copies every slice repeats the work.

Where the owners divide the stack, the state stays with them: it is cut along the stack, and the two
all-to-alls are all there is. Where they do not, it is cut like the leaf (a Gram matrix along its
rows and columns) and travels too, as padding a checkpoint would tie it to the mesh. A Gram matrix
whose side the axes do not divide is copied.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from maxmars.optim._exchange import (
    AnyMesh,
    Stack,
    check_is_mesh,
    num_devices,
    on_mesh,
    placed_zeros,
    stacks_of,
)
from maxmars.optim._matrices import MatrixSpec, resolve_specs
from maxmars.optim._rules import (
    Rule,
    Scalar,
    ScalarOrSchedule,
    Tree,
    WeightUpdate,
    bias_correction,
    by_kind,
    cast_like,
    check_numbers,
    in_float32,
    per_matrix,
    vector_rate,
    wide_dtype,
)

# --- the optimizer -------------------------------------------------------------------------------


MAX_PRECONDITION_DIM = 2048

Matrices = Float[Array, "*stack_rows_cols"]  # of another shape where no side is preconditioned
Square = Float[Array, "stack side side"]
Decomposition = Callable[[Square], Square]
Step = Callable[
    [Matrices, Matrices | None, "MatrixState", jax.Array], tuple[Matrices, "MatrixState"]
]


class ScaleBySoapState(NamedTuple):
    """State of `scale_by_soap`; trees like the parameters.

    The Gram matrices and bases of a parameter are [*batch, side, side] in float32 (float64 of a
    float64 parameter), or None where the side keeps the identity. None of it depends on the mesh
    but the shardings, see `soap_shardings`.
    """

    count: jax.Array
    """Number of updates, the first included, int32."""
    mu: Tree
    """First moment m, in the eigenbases; the parameters' shapes; None with a momentum kernel."""
    nu: Tree
    """Second moment v, in the eigenbases; the parameters' shapes and dtypes."""
    row_gram: Tree
    """L, moving average of G Gᵀ."""
    col_gram: Tree
    """R, moving average of Gᵀ G."""
    row_basis: Tree
    """Q_L, eigenvectors in columns."""
    col_basis: Tree
    """Q_R, eigenvectors in columns."""
    kernel: Any = None
    """State of the momentum kernel, whose EMAs are not in the eigenbases."""


class MatrixState(NamedTuple):
    """The arrays of one parameter in a `ScaleBySoapState`."""

    mu: Any
    nu: Any
    row_gram: Any
    col_gram: Any
    row_basis: Any
    col_basis: Any

    @property
    def sides(self) -> tuple[bool, bool]:
        """Whether rows and columns are preconditioned."""
        return self.row_gram is not None, self.col_gram is not None


def scale_by_soap(
    *,
    b1: Scalar = 0.95,
    b2: Scalar = 0.95,
    shampoo_beta: Scalar | None = None,
    eps: Scalar = 1e-8,
    precondition_frequency: int | jax.Array = 10,
    max_precondition_dim: int | None = None,
    momentum_kernel: optax.GradientTransformation | None = None,
    mu_dtype: Any = None,
    matrix_specs: Any = None,
    mesh: AnyMesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction U that `soap` steps along; its arguments, and its errors, are those of `soap`.

    Unlike there, vectors and embeddings take Adam with the matrices' hyperparameters, and nothing
    in the first step.
    """
    shampoo_beta = b2 if shampoo_beta is None else shampoo_beta
    check_numbers("lie in [0, 1)", b1=b1, b2=b2, shampoo_beta=shampoo_beta)
    check_numbers("be positive", eps=eps, precondition_frequency=precondition_frequency)
    check_numbers("be positive", max_precondition_dim=max_precondition_dim)
    check_is_mesh(mesh)
    if isinstance(max_precondition_dim, jax.Array):
        raise ValueError(
            "max_precondition_dim decides the shapes of the state and cannot be traced; give "
            "inject_hyperparams static_args=('max_precondition_dim',)."
        )
    limit = MAX_PRECONDITION_DIM if max_precondition_dim is None else max_precondition_dim

    def step(
        grads: Matrices, momentum: Matrices | None, state: MatrixState, count: jax.Array
    ) -> tuple[Matrices, MatrixState]:
        directions, new = _adam(grads, momentum, state, count, b1, b2, eps)
        new = _update_grams(grads, new, shampoo_beta)
        # Hyperparameters of a wider dtype widen what they are multiplied with.
        return directions, _update_bases(cast_like(new, state), count, precondition_frequency)

    def sides(x: Any, spec: MatrixSpec) -> tuple[bool, bool]:
        if not spec.is_matrix or not x.size:
            return False, False
        rows, cols = (math.prod(x.shape[i] for i in axes) for axes in (spec.rows, spec.cols))
        return rows <= limit, cols <= limit

    def zeros(param: Any, layout: Layout | None) -> MatrixState:
        if layout is None:
            mu, nu = jnp.zeros_like(param, mu_dtype), jnp.zeros_like(param)
            return MatrixState(mu, nu, None, None, None, None)
        wide = wide_dtype(param.dtype)
        dtypes = [mu_dtype or param.dtype, param.dtype, wide, wide, wide, wide]
        arrays: list[Any] = [
            None if stack is None else placed_zeros(stack.shape, dtype, stack.partition, stack.mesh)
            for stack, dtype in zip(layout.state, dtypes, strict=True)
        ]
        return MatrixState(*arrays)

    def make(specs: Tree) -> optax.GradientTransformation:
        def init_fn(params: Tree) -> ScaleBySoapState:
            leaves, treedef = jax.tree.flatten(params)
            chosen = list(map(sides, leaves, jax.tree.leaves(specs)))
            states = list(map(zeros, leaves, _layouts(params, specs, mesh, chosen)))
            if momentum_kernel is None:
                return _joined(jnp.zeros([], jnp.int32), states, treedef)
            states = [own._replace(mu=None) for own in states]
            kernel = momentum_kernel.init(params)
            return _joined(jnp.zeros([], jnp.int32), states, treedef, kernel)

        def update_fn(
            updates: Tree, state: Any, params: Tree = None
        ) -> tuple[Tree, ScaleBySoapState]:
            leaves, treedef = jax.tree.flatten(updates)
            kernel, momenta = None, [None] * len(leaves)
            if momentum_kernel is not None:  # linear, so that it may come before the bases
                momentum, after = momentum_kernel.update(updates, state.kernel, params)
                momenta = jax.tree.leaves(momentum)
                choose = functools.partial(jnp.where, state.count == 0)  # the first step has no m
                kernel = jax.tree.map(choose, state.kernel, after)
            states = _by_parameter(state, treedef)
            layouts = _layouts(updates, specs, mesh, [own.sides for own in states])
            results = [
                step(g, m, own, state.count)
                if layout is None
                else _by_owners(step, layout, g, m, own, state.count)
                for g, m, own, layout in zip(leaves, momenta, states, layouts, strict=True)
            ]
            directions = jax.tree.unflatten(treedef, [direction for direction, _ in results])
            count = jnp.asarray(optax.safe_increment(state.count))
            return directions, _joined(count, [own for _, own in results], treedef, kernel)

        return in_float32(optax.GradientTransformation(init_fn, update_fn))

    return per_matrix(make, matrix_specs)


def soap(
    learning_rate: ScalarOrSchedule,
    *,
    b1: Scalar = 0.95,
    b2: Scalar = 0.95,
    shampoo_beta: Scalar | None = None,
    eps: Scalar = 1e-8,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Any = None,
    weight_update: WeightUpdate | None = None,
    precondition_frequency: int | jax.Array = 10,
    max_precondition_dim: int | None = None,
    momentum_kernel: optax.GradientTransformation | None = None,
    mu_dtype: Any = None,
    vector_learning_rate: ScalarOrSchedule | None = None,
    vector_learning_rate_scale: Scalar | None = None,
    vector_b1: Scalar = 0.9,
    vector_b2: Scalar = 0.95,
    vector_weight_decay: ScalarOrSchedule | None = None,
    matrix_specs: Any = None,
    mesh: AnyMesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SOAP on matrices, AdamW on vectors and on the matrices that their `MatrixSpec` calls an
    embedding, which are vectors here. The defaults of the matrices are the official code's, but for
    `max_precondition_dim` (10,000 there) and `weight_decay`.

    Args:
      learning_rate: η of the matrices, a float, a traced scalar or a schedule.
      b1: decay of the matrices' first moment, in [0, 1).
      b2: decay of the matrices' second moment, in [0, 1).
      shampoo_beta: decay of the Gram matrices, in [0, 1); None is `b2`.
      eps: added to the root of the second moment; of matrices before its bias correction.
      weight_decay: decoupled decay λ of the matrices, multiplied by η; a float or a schedule. The
        official code and maxmars's trainer have 0.01. Nothing decays in the first step.
      mask: which parameters decay, a tree of bools or a function from parameters to one.
      weight_update: changes of −η (u + λ p): hyperball, floor, cautious or coupled decay.
      precondition_frequency: k, steps between two power iterations of the bases.
      max_precondition_dim: longest side of a matrix that is preconditioned, None is 2048; a longer
        one keeps the identity. Gram matrix and basis of a side n are 2 n² numbers.
      momentum_kernel: what makes the matrices' m_t / (1 − β₁ᵗ) of the gradients from the second on,
        in place of the EMA: `maxmars.optim.momentum_kernel(..., debias=True)`.
      mu_dtype: dtype of the matrices' first moment; None keeps the parameter's.
      vector_learning_rate: learning rate of vectors; None takes the matrices'.
      vector_learning_rate_scale: instead, their learning rate as a multiple of `learning_rate`; 1
        by default.
      vector_b1: decay of the vectors' first moment, in [0, 1).
      vector_b2: decay of the vectors' second moment, in [0, 1).
      vector_weight_decay: decay of vectors, a float or a schedule; None takes `weight_decay`, and
        maxmars's trainer has 0.
      matrix_specs: `MatrixSpec`s as a pytree prefix, or a function from parameters to one. Default:
        each 2-D leaf is a matrix.
      mesh: device mesh of the parameters. `MatrixSpec.partition` then says how each is split, and
        whole matrices are preconditioned by owners; `soap_shardings` says how the state lies.

    Raises:
      ValueError: an argument is out of range, the vectors' learning rate is given twice or as a
        constant beside a schedule, or a partition does not fit the mesh.
    """
    check_numbers("lie in [0, 1)", vector_b1=vector_b1, vector_b2=vector_b2)
    direction = scale_by_soap(
        b1=b1,
        b2=b2,
        shampoo_beta=shampoo_beta,
        eps=eps,
        precondition_frequency=precondition_frequency,
        max_precondition_dim=max_precondition_dim,
        momentum_kernel=momentum_kernel,
        mu_dtype=mu_dtype,
        mesh=mesh,
    )
    rate = vector_rate(learning_rate, vector_learning_rate, vector_learning_rate_scale)
    adam = optax.scale_by_adam(vector_b1, vector_b2, eps)
    if vector_weight_decay is None:
        vector_weight_decay = weight_decay
    vector = Rule([adam], vector_weight_decay, rate)
    rules = {
        "matrix": Rule([direction], _after_first(weight_decay), learning_rate),
        "vector": vector,
        "embedding": vector,
    }
    return by_kind(rules, matrix_specs, mask, weight_update)


def soap_shardings(opt_state: Any, mesh: AnyMesh, matrix_specs: Any = None) -> Any:
    """Shardings of SOAP's state on a mesh.

    Args:
      opt_state: the state (arrays or abstract) of an optimizer that contains `scale_by_soap`.
      mesh: the mesh.
      matrix_specs: those of the optimizer, each with its `partition`.

    Returns:
      A tree like `opt_state` of NamedShardings; None where the state is not one of SOAP's matrices.

    Raises:
      ValueError: a partition is missing or does not fit the mesh.
    """

    def is_soap(x: Any) -> bool:
        return isinstance(x, ScaleBySoapState)

    def shardings(x: Any) -> Any:
        if not is_soap(x):
            return None
        treedef = jax.tree.structure(x.nu)
        sides = [own.sides for own in _by_parameter(x, treedef)]
        layouts = _layouts(x.nu, resolve_specs(matrix_specs, x.nu), mesh, sides)
        stacks = [MatrixState(*layout.state if layout else [None] * 6) for layout in layouts]
        if x.kernel is not None:
            stacks = [own._replace(mu=None) for own in stacks]
        by_field = jax.tree.map(
            lambda stack: NamedSharding(mesh, stack.partition), _joined(None, stacks, treedef)
        )
        return by_field._replace(kernel=jax.tree.map(lambda _: None, x.kernel))

    return jax.tree.map(shardings, opt_state, is_leaf=is_soap)


def _after_first(weight_decay: ScalarOrSchedule) -> optax.Schedule:
    """The decay, but zero in the first step, which changes no parameter."""

    def schedule(count: jax.typing.ArrayLike) -> Any:
        decay = weight_decay(count) if callable(weight_decay) else weight_decay
        return jnp.where(jnp.asarray(count) == 0, 0.0, decay)

    return schedule


def _by_parameter(state: ScaleBySoapState, treedef: Any) -> list[MatrixState]:
    trees = [treedef.flatten_up_to(tree) for tree in state[1:7]]
    return [MatrixState(*arrays) for arrays in zip(*trees, strict=True)]


def _joined(
    count: Any, states: list[MatrixState], treedef: Any, kernel: Any = None
) -> ScaleBySoapState:
    """The inverse of `_by_parameter`."""
    fields = list(zip(*states, strict=True)) or [()] * 6
    trees = (jax.tree.unflatten(treedef, field) for field in fields)
    return ScaleBySoapState(count, *trees)._replace(kernel=kernel)


# --- one step of a stack of matrices: Adam in the eigenbases of their Gram matrices --------------


def _adam(
    grads: Matrices,
    momentum: Matrices | None,
    state: MatrixState,
    count: Int[Array, ""],
    b1: Scalar,
    b2: Scalar,
    eps: Scalar,
) -> tuple[Matrices, MatrixState]:
    """Adam's direction in the eigenbases; zero in the first step, which has no bases yet."""
    projected = _to_bases(grads, state)
    if momentum is None:
        m = mu = b1 * state.mu + (1 - b1) * projected
    else:
        m, mu = _to_bases(momentum, state), None
    nu = b2 * state.nu + (1 - b2) * jnp.square(projected)
    updates = jnp.maximum(count, 1)  # the first step is not one of Adam's
    correction = jnp.sqrt(bias_correction(b2, updates))
    if momentum is None:
        correction = correction / bias_correction(b1, updates)
    scaled = correction.astype(m.dtype) * m / (jnp.sqrt(nu) + eps)
    directions = _from_bases(scaled, state)
    first = count == 0
    mu = None if mu is None else jnp.where(first, state.mu, mu)
    nu = jnp.where(first, state.nu, nu)
    return jnp.where(first, 0, directions), state._replace(mu=mu, nu=nu)


def _update_grams(grads: Matrices, state: MatrixState, beta: Scalar) -> MatrixState:
    row_gram, col_gram = state.row_gram, state.col_gram
    if row_gram is not None:
        row_gram = beta * row_gram + (1 - beta) * _matmul(grads, grads.mT)
    if col_gram is not None:
        col_gram = beta * col_gram + (1 - beta) * _matmul(grads.mT, grads)
    return state._replace(row_gram=row_gram, col_gram=col_gram)


def _update_bases(
    state: MatrixState, count: Int[Array, ""], frequency: int | jax.Array
) -> MatrixState:
    if state.row_gram is None and state.col_gram is None:
        return state
    branch = jnp.where(count == 0, 1, jnp.where(count % frequency == 0, 2, 0))
    return jax.lax.switch(branch, (_same_bases, _first_bases, _next_bases), state)


def _same_bases(state: MatrixState) -> MatrixState:
    """The state as it is. Outside of jit, a new lambda in each step would compile each time."""
    return state


def _first_bases(state: MatrixState) -> MatrixState:
    def basis(gram: Square | None) -> Square | None:
        return None if gram is None else _eigenvectors(_normalized(gram))

    return state._replace(row_basis=basis(state.row_gram), col_basis=basis(state.col_gram))


def _next_bases(state: MatrixState) -> MatrixState:
    """A power iteration of each basis, and the moments in the new ones."""
    mu, nu = state.mu, state.nu
    original = None if mu is None else _from_bases(mu, state)
    row_basis, col_basis = state.row_basis, state.col_basis
    if row_basis is not None:
        row_basis, permutation = _power_iteration(state.row_gram, row_basis)
        nu = jnp.take_along_axis(nu, permutation[:, :, None], axis=1)
    if col_basis is not None:
        col_basis, permutation = _power_iteration(state.col_gram, col_basis)
        nu = jnp.take_along_axis(nu, permutation[:, None, :], axis=2)
    state = state._replace(nu=nu, row_basis=row_basis, col_basis=col_basis)
    return state if original is None else state._replace(mu=_to_bases(original, state))


def _power_iteration(gram: Square, basis: Square) -> tuple[Square, Int[Array, "stack side"]]:
    """The next basis: Q of the QR decomposition of gram @ basis, whose columns are first sorted by
    estimated eigenvalues. Also the permutation by which they are sorted."""
    image = _matmul(_normalized(gram), basis)
    eigenvalues = jnp.sum(basis * image, axis=-2)
    permutation = jnp.argsort(eigenvalues, axis=-1, descending=True)
    image = jnp.take_along_axis(image, permutation[:, None, :], axis=-1)
    return _orthonormal_columns(image), permutation


def _to_bases(x: Matrices, state: MatrixState) -> Matrices:
    if state.row_basis is not None:
        x = _matmul(state.row_basis.mT, x)
    return x if state.col_basis is None else _matmul(x, state.col_basis)


def _from_bases(x: Matrices, state: MatrixState) -> Matrices:
    if state.row_basis is not None:
        x = _matmul(state.row_basis, x)
    return x if state.col_basis is None else _matmul(x, state.col_basis.mT)


def _normalized(gram: Square) -> Square:
    """The Gram matrix over its trace, which keeps the eigenvectors and prevents underflow."""
    trace = jnp.trace(gram, axis1=-2, axis2=-1)[:, None, None]
    return gram / jnp.where(trace > 0, trace, 1)


def _matmul(
    x: Float[Array, "stack rows inner"], y: Float[Array, "stack inner cols"]
) -> Float[Array, "stack rows cols"]:
    # By default an accelerator may multiply float32 in fewer bits, and eigenvectors need them.
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


# --- who preconditions which matrix, and where the state lies on a mesh --------------------------


class Layout(NamedTuple):
    """Layouts on a mesh of a parameter of matrices and of its state."""

    grads: Stack
    """Layout of gradients and updates."""
    moment: Stack
    """Layout of m and v."""
    row_square: Stack | None
    """Layout of L and Q_L; None where the side keeps the identity."""
    col_square: Stack | None
    """Layout of R and Q_R; None where the side keeps the identity."""

    @property
    def state(self) -> tuple[Stack | None, ...]:
        """The layouts of the arrays of `MatrixState`, in its order."""
        return (self.moment, self.moment, *(self.row_square, self.col_square) * 2)


def _by_owners(
    step: Step,
    layout: Layout,
    grads: jax.Array,
    momentum: jax.Array | None,
    state: MatrixState,
    count: jax.Array,
) -> tuple[jax.Array, MatrixState]:
    """`step` on whole matrices [stack, rows, cols], each by its owner.

    Returns:
      The update and the new state, each in its partition.
    """
    arrays, treedef = jax.tree.flatten((grads, momentum, state))
    each = zip((layout.grads, layout.grads, *layout.state), (grads, momentum, *state), strict=True)
    stacks = [stack for stack, x in each if stack is not None and x is not None]

    def local(shards: Sequence[jax.Array], count: jax.Array) -> list[jax.Array]:
        owned = [stack.to_owners(x) for stack, x in zip(stacks, shards, strict=True)]
        own_grads, own_momentum, own_state = jax.tree.unflatten(treedef, owned)
        directions, new = step(own_grads, own_momentum, own_state, count)
        results = jax.tree.leaves((directions, own_momentum, new))
        return [
            stack.from_owners(y, x.shape)
            for stack, y, x in zip(stacks, results, shards, strict=True)
        ]

    directions, _, new = jax.tree.unflatten(treedef, on_mesh(local, stacks, arrays, count))
    return directions, new


def _layouts(
    tree: Tree, specs: Tree, mesh: AnyMesh | None, sides: Sequence[tuple[bool, bool]]
) -> list[Layout | None]:
    """The layout of each leaf of a tree like the parameters; None where no side is preconditioned.
    `sides` has for each leaf whether rows and whether columns are preconditioned."""
    with_sides = zip(jax.tree.leaves(specs), sides, strict=True)
    chosen = [spec if any(either) else None for spec, either in with_sides]
    stacks = stacks_of(tree, chosen, mesh, blocks=False)
    return [_layout(stacks[i], *sides[i]) if i in stacks else None for i in range(len(chosen))]


def _layout(grads: Stack, rows: bool, cols: bool) -> Layout:
    # Example: MLP kernels [L 12, D 768, F 3072], cut over fsdp=4 on D. Between steps the state lies
    #
    #   m, v   [12, 768, 3072]     L, Q_L   [12, 768, 768]     R, Q_R   [12, 3072, 3072]
    #
    # * `with_owners`, as 4 divides 12: cut over fsdp on the stack, 3 matrices a device, where the
    #   step needs them. Only gradients and updates travel.
    # * else, with 10 layers: m and v like the gradient, L, R and the bases cut over fsdp on their
    #   rows, if these divide ("divided"), or whole on every device. All travel to the owners.
    mesh, cuts = grads.mesh, grads.cuts
    axes = tuple(itertools.chain(*grads.pieces))
    # Where the owners divide the stack, the state stays with them between steps: then it is an
    # array that is cut along the stack's axis, which any mesh can restore.
    with_owners = len(grads.stack) == 1 and grads.local_shape[grads.stack[0]] % grads.owners == 0
    moment, batch = grads, [cuts[axis] for axis in grads.stack]
    if with_owners:
        batch = [(*batch[0], *axes)]
        on_stack = tuple(batch[0] if axis in grads.stack else () for axis in range(len(cuts)))
        moment = replace(grads, cuts=on_stack)

    def square(size: int) -> Stack:
        """The layout of Gram matrices or bases: with the owners, else cut, else copied."""
        # The first mesh axis cuts the rows of the square, the others its columns.
        pieces = ((), ()) if with_owners else (axes[:1], axes[1:])
        divided = all(size % num_devices(names, mesh) == 0 for names in pieces)
        return Stack(
            name=grads.name,
            mesh=mesh,
            shape=(*(grads.shape[axis] for axis in grads.stack), size, size),
            cuts=(*batch, *(pieces if divided else ((), ()))),
            stack=tuple(range(len(batch))),
            rows=(len(batch),),
            cols=(len(batch) + 1,),
            copies=() if divided else axes,
        )

    _, row_size, col_size = grads.sizes(grads.shape)
    return Layout(
        grads, moment, square(row_size) if rows else None, square(col_size) if cols else None
    )


# --- QR and eigenvectors, where a linear algebra library may block -------------------------------

# On CPU, `jnp.linalg` calls LAPACK. In jaxlib before 0.11.2 such a call waits for work that it
# hands to the pool of threads it runs in itself: a program with as many independent calls as the
# pool has threads can block for ever (24 QR decompositions on two cores do, and two on two fake
# devices). There, what XLA compiles itself is used, as JAX has it do on TPU.
_LAPACK_MAY_BLOCK = jax.__version_info__ < (0, 11, 2)


def _orthonormal_columns(x: Square) -> Square:
    """Q of the QR decomposition of each matrix of a stack."""

    def of_xla(x: Square) -> Square:
        taus = jax.ShapeDtypeStruct(x.shape[:-1], x.dtype)
        reflectors = _xla_call("Qr", (x, taus), x)
        return _xla_call("ProductOfElementaryHouseholderReflectors", x, *reflectors)

    return _by_platform(x, of_xla, lambda x: jnp.linalg.qr(x)[0])


def _eigenvectors(x: Square) -> Square:
    """Eigenvectors of each symmetric matrix of a stack in columns, eigenvalues falling."""

    def of_xla(x: Square) -> Square:
        eigenvalues = jax.ShapeDtypeStruct(x.shape[:-1], x.dtype)
        # The lower half, sorted, 15 sweeps of rotations (ten do for a thousand rows) whatever is
        # left, as else the sweeps of a matrix would depend on those beside it in the stack.
        return _xla_call("Eigh", (x, eigenvalues), x, config="1,1,15,0")[0][..., ::-1]

    return _by_platform(x, of_xla, lambda x: jnp.linalg.eigh(x)[1][..., ::-1])


def _by_platform(x: Square, of_xla: Decomposition, of_library: Decomposition) -> Square:
    if not _LAPACK_MAY_BLOCK:
        return of_library(x)
    return jax.lax.platform_dependent(x, cpu=of_xla, default=of_library)


def _xla_call(target: str, result: Any, *arguments: jax.Array, config: str = "") -> Any:
    call = jax.ffi.ffi_call(
        target,
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), result),
        vmap_method="broadcast_all",  # all take any number of stacked axes
        custom_call_api_version=1,
        legacy_backend_config=config,
    )
    return call(*arguments)
