"""Several documents in one row: each has the logits, loss and gradients that it has alone."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from tiny import MODEL, random_params
from trees import mesh_of

from maxmars.model.language_model import make_model, mean_loss

# The documents of each row, by length; padding fills the row up to max_seq_len + 1 tokens.
LENGTHS = [[9, 4, 4], [17], [4, 9], [9, 4]]
PLAIN = dataclasses.replace(MODEL, attention="plain")


def random_documents(seed=0):
    rng = np.random.default_rng(seed)
    return [[rng.integers(0, 256, n).astype(np.int32) for n in row] for row in LENGTHS]


def packed(documents):
    """One row a list of documents; the first token of each is not predicted."""
    shape = (len(documents), MODEL.max_seq_len + 1)
    tokens, mask = np.full(shape, 256, np.int32), np.zeros(shape, bool)
    segment_ids, positions = np.full(shape, 99, np.int32), np.zeros(shape, np.int32)
    for row, of_row in enumerate(documents):
        at = 0
        for number, document in enumerate(of_row):
            place = row, slice(at, at + len(document))
            tokens[place], segment_ids[place] = document, 3 * number  # any numbers will do
            positions[place], mask[place] = np.arange(len(document)), True
            mask[row, at] = False
            at += len(document)
    return {"tokens": tokens, "mask": mask, "segment_ids": segment_ids, "positions": positions}


@functools.cache
def loss_and_grads(config):
    return jax.jit(jax.value_and_grad(lambda p, batch: mean_loss(make_model(config, p), **batch)))


def with_mean_one(mask):
    return mask / mask[:, 1:].mean(dtype=np.float32)


def assert_close(result, expected):
    for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def one_by_one(texts):
    """Mean loss and gradients over all targets, from a plain row a text."""
    params = random_params(MODEL)
    result = [loss_and_grads(PLAIN)(params, {"tokens": text[None]}) for text in texts]
    sizes = np.array([len(text) - 1 for text in texts])
    return jax.tree.map(lambda *x: np.tensordot(sizes / sizes.sum(), np.stack(x), 1), *result)


@pytest.mark.seconds
def test_loss_and_gradients_are_those_of_the_documents_alone():
    """By blocks on a mesh, against the plain formula on one device."""
    config, batch = dataclasses.replace(MODEL, attention="blocked"), packed(random_documents())
    batch["mask"] = with_mean_one(batch["mask"])
    with jax.set_mesh(mesh_of(data=2, fsdp=2, tensor=2)):
        result = loss_and_grads(config)(random_params(MODEL), batch)
    assert_close(result, one_by_one(list(itertools.chain(*random_documents()))))


def test_logits_are_those_of_the_documents_alone():
    params = random_params(MODEL)
    apply = jax.jit(lambda params, tokens, **given: make_model(PLAIN, params)(tokens, **given))
    documents = random_documents()
    batch = {name: array[:, :-1] for name, array in packed(documents).items() if name != "mask"}
    logits = jax.device_get(apply(params, **batch))
    for row, of_row in zip(logits, documents, strict=True):
        at = 0
        for document in of_row:
            result = row[at : at + len(document)]  # the last token of a window is no input
            expected = jax.device_get(apply(params, document[None, : len(result)]))
            np.testing.assert_allclose(result, expected[0], atol=2e-5)
            at += len(document)


@pytest.mark.seconds
def test_a_mask_counts_the_targets_that_it_names():
    """The other targets are as if they were not there; a row's first token is none anyway."""
    tokens = np.random.default_rng(1).integers(0, 256, (4, 17)).astype(np.int32)
    until = np.array([17, 9, 9, 9])
    batch = {"tokens": tokens, "mask": with_mean_one(np.arange(17) < until[:, None])}
    result = loss_and_grads(PLAIN)(random_params(MODEL), batch)
    assert_close(result, one_by_one([row[:n] for row, n in zip(tokens, until, strict=True)]))
