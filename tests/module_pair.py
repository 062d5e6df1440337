"""torch.nn.MultiheadAttention beside flash_attn.nn.MultiheadAttention: the same parameters, the same call."""

import warnings
from dataclasses import dataclass

import torch
from torch import nn

import flash_attn.nn

E, HEADS = 24, 3


def make_pair(dtype=torch.float64, device="cpu", training=True, **options):
    """(torch's, ours), with parameters that are all random: torch's biases begin with zeros."""
    options = {"embed_dim": E, "num_heads": HEADS, "dtype": dtype, "device": device, **options}
    theirs = nn.MultiheadAttention(**options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    ours = flash_attn.nn.MultiheadAttention(**options)
    ours.load_state_dict(theirs.state_dict())
    return theirs.train(training), ours.train(training)


def draw(theirs, seqlen_q=7, seqlen_k=7, batch=2, sharing="all"):
    """query, key and value as the module's layout wants them, batch None: unbatched. sharing: "all" one
    tensor, "kv" key and value one, "none"."""
    def rows(seqlen, features):
        shape = (seqlen, features) if batch is None else (seqlen, batch, features)
        x = torch.randn(shape).to(theirs.out_proj.weight)
        return x.transpose(0, 1) if theirs.batch_first and batch is not None else x

    query = rows(seqlen_q, theirs.embed_dim)
    if sharing == "all":
        return query, query, query
    key = rows(seqlen_k, theirs.kdim)
    return query, key, key if sharing == "kv" else rows(seqlen_k, theirs.vdim)


@dataclass
class Answer:
    out: torch.Tensor
    weights: torch.Tensor | None
    gradients: dict


def answer(module, inputs, seed=0, **options):
    """Outputs, and gradients of a loss of both results in inputs, parameters and masks that want one."""
    made = {}
    leaves = [made.setdefault(id(x), x.detach().clone().requires_grad_()) for x in inputs]
    masks = {}
    for name in ("attn_mask", "key_padding_mask"):
        mask = options.get(name)
        if mask is not None and mask.requires_grad:
            masks[name] = options[name] = mask.detach().clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched", UserWarning)
        out, weights = module(*leaves, **options)
    generator = torch.Generator().manual_seed(seed)
    loss = 0
    for result in (out, weights):
        if result is not None:
            factor = torch.randn(result.shape, generator=generator, dtype=torch.float64)
            loss = loss + (result * factor.to(result.device, result.dtype)).sum()
    wanted = {**dict(zip(("query", "key", "value"), leaves)), **masks, **dict(module.named_parameters())}
    gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return Answer(out.detach(), None if weights is None else weights.detach(), dict(zip(wanted, gradients)))


def compare(pair, inputs, rtol=1e-10, atol=1e-11, **options):
    theirs, ours = (answer(module, inputs, **dict(options)) for module in pair)
    assert ours.out.shape == theirs.out.shape and ours.out.dtype == theirs.out.dtype
    torch.testing.assert_close(ours.out, theirs.out, rtol=rtol, atol=atol, msg=lambda m: f"out: {m}")
    assert (ours.weights is None) == (theirs.weights is None)
    if ours.weights is not None:
        torch.testing.assert_close(ours.weights, theirs.weights, rtol=rtol, atol=atol,
                                   msg=lambda m: f"weights: {m}")
    for name, gradient in theirs.gradients.items():
        mine = ours.gradients[name]
        assert (mine is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(mine, gradient, rtol=rtol, atol=atol, msg=lambda m: f"d {name}: {m}")
    return theirs, ours
