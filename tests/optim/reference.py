"""What the optimizers compute, in plain float64 NumPy: one rule a function, one matrix at a time.

A rule takes the gradients of all steps and yields the direction of each; `descend` makes parameters
of directions. Hyperparameters may be functions of the number of steps before, as schedules are.
"""

import numpy as np

KELLER = ((3.4445, -4.7750, 2.0315),) * 5


def at(hyperparameter, step):
    return float(hyperparameter(step)) if callable(hyperparameter) else hyperparameter


def newton_schulz(matrix, triples=KELLER, eps=1e-7):
    """The matrix with its singular values moved towards 1."""
    x = np.asarray(matrix, np.float64)
    x = x / (np.linalg.norm(x) + eps)
    for a, b, c in triples:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


# --- momentum ------------------------------------------------------------------------------------


def heavy_ball(gradients, decay):
    """The sum of past gradients, each decayed once a step."""
    m = 0.0
    for g in gradients:
        m = decay * m + g
        yield m


def nesterov(gradients, decay):
    """Where heavy-ball momentum will be after the next step."""
    for g, m in zip(gradients, heavy_ball(gradients, decay), strict=True):
        yield g + decay * m


def correct(gradients, last_gradients, b1, gamma, clip=None):
    """MARS: the gradients with their correction, scaled down to a norm of at most `clip`."""
    for t, (g, last) in enumerate(zip(gradients, last_gradients, strict=True)):
        c = g + at(gamma, t) * b1 / (1 - b1) * (g - last)
        yield c if clip is None else c / max(1, np.linalg.norm(c) / clip)


def kernel(gradients, decays, weights, gradient_weight=0.0, debias=False):
    """A momentum kernel: a weighted sum of the gradient and of its EMAs; `debias` divides each by
    the same EMA of ones."""
    debias = [debias] * len(decays) if isinstance(debias, bool) else debias
    emas, ones = [0.0] * len(decays), [0.0] * len(decays)
    for t, g in enumerate(gradients):
        total = at(gradient_weight, t) * g
        for k, (decay, weight) in enumerate(zip(decays, weights, strict=True)):
            b = at(decay, t)
            emas[k] = b * emas[k] + (1 - b) * g
            ones[k] = b * ones[k] + (1 - b)
            total = total + at(weight, t) * emas[k] / (ones[k] if debias[k] else 1)
        yield total


# --- directions ----------------------------------------------------------------------------------


def adam(gradients, b1=0.9, b2=0.999, eps=1e-8, amsgrad=False):
    m = v = largest = 0.0
    for t, g in enumerate(gradients, start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        largest = np.maximum(largest, v)
        root = np.sqrt((largest if amsgrad else v) / (1 - b2**t))
        yield m / (1 - b1**t) / (root + eps)


def ademamix(gradients, warmup, alpha=8.0, b1=0.9, b2=0.999, b3=0.9999, eps=1e-8):
    """Algorithm 1 of arXiv 2409.03137."""
    fast = slow = square = 0.0
    for t, g in enumerate(gradients, start=1):
        done = min(t / warmup, 1)
        slopes = np.log(b1), np.log(b3)
        now = np.exp(slopes[0] * slopes[1] / ((1 - done) * slopes[1] + done * slopes[0]))
        fast = b1 * fast + (1 - b1) * g
        slow = now * slow + (1 - now) * g
        square = b2 * square + (1 - b2) * g**2
        mixed = fast / (1 - b1**t) + alpha * done * slow
        yield mixed / (np.sqrt(square / (1 - b2**t)) + eps)


def spectral(momenta, scale):
    """Orthogonalised momenta: `spectral` for a spectral norm of 1 and more, `rms` for an RMS of
    0.2."""
    for m in momenta:
        rows, cols = m.shape
        sizes = {"spectral": max(1, cols / rows) ** 0.5, "rms": 0.2 * max(rows, cols) ** 0.5}
        yield newton_schulz(m) * sizes[scale]


def even_rows(directions, b2):
    """NorMuon, arXiv 2510.05491: rows, which are outputs, of even size, and the norm as it was."""
    moment = 0.0
    for u in directions:
        moment = b2 * moment + (1 - b2) * np.mean(u**2, axis=0, keepdims=True)
        even = u / (np.sqrt(moment) + 1e-10)
        yield even * np.linalg.norm(u) / (np.linalg.norm(even) + 1e-10)


def soap(gradients, *, frequency, first_bases, b1=0.95, b2=0.95, beta=0.95, eps=1e-8):
    """The momentum is in the parameter's own basis; the first direction is zero."""
    g = gradients[0]
    grams, bases = [np.zeros((n, n)) for n in g.shape], [np.eye(n) for n in g.shape]
    m, v = np.zeros_like(g), np.zeros_like(g)
    for t, g in enumerate(gradients):
        direction = np.zeros_like(g)
        if t > 0:
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * (bases[0].T @ g @ bases[1]) ** 2
            rotated = bases[0].T @ m @ bases[1] / (1 - b1**t)
            scaled = rotated * np.sqrt(1 - b2**t) / (np.sqrt(v) + eps)
            direction = bases[0] @ scaled @ bases[1].T
        yield direction
        for i, outer in enumerate([g @ g.T, g.T @ g]):
            grams[i] = beta * grams[i] + (1 - beta) * outer
        for i in range(2):
            if t == 0:
                bases[i] = np.asarray(first_bases[i])
            elif t % frequency == 0:
                order = np.argsort(-np.diag(bases[i].T @ grams[i] @ bases[i]))
                v = np.take(v, order, axis=i)
                bases[i] = np.linalg.qr(grams[i] @ bases[i][:, order])[0]


# --- parameters ----------------------------------------------------------------------------------


def decayed(p, u, rate, decay):
    """One step along a direction, with decoupled weight decay."""
    return p - rate * (u + decay * p)


def cautious(p, u, rate, decay):
    """Only what the direction makes smaller anyway decays."""
    return p - rate * (u + decay * p * (u * p >= 0))


def on_sphere(p, u, rate, decay):
    """Hyperball: a step relative to the parameter's norm, which stays as it is; nothing decays."""
    moved = p - rate * u * np.linalg.norm(p) / max(np.linalg.norm(u), 1e-10)
    return moved * np.linalg.norm(p) / max(np.linalg.norm(moved), 1e-10)


def descend(p, directions, rate, decay, rule=decayed):
    """The parameter after each step."""
    for t, u in enumerate(directions):
        p = rule(p, u, at(rate, t), at(decay, t))
        yield p
