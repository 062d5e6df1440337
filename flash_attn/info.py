"""What a bug report needs: versions, engines, and whether they compute the right thing here."""

import platform
import sys

import torch

from . import _C, operators

VERSION = "0.1.0"  # this library's own; the distribution's is the interface level that other projects check


def build_info():
    """Versions and engines of this installation.

    Returns:
        dict: version (this library's own), interface_version (of flash_attn's interface), compiler and
            cuda_toolkit (that built the engines; None: no GPU engine), torch, python, platform, threads, and
            engines: a list of dicts, each with name, configuration, usable, chosen (it runs here), and
            why_not where it is not usable on this machine.
    """
    from . import __version__

    return {
        "version": VERSION,
        "interface_version": __version__,
        "compiler": _C.compiler,
        "cuda_toolkit": _C.cuda_toolkit or None,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "engines": _C.engines(),
    }


def self_test(dtype, device="cpu"):
    """Largest error of out and of q's gradient against standard attention in float64, causal.

    Returns:
        (float, float): absolute errors; values are of order 1.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(1, 200, 2, 64, generator=generator) for _ in range(4))
    q, k, v, dout = (tensor.to(device, dtype) for tensor in drawn)
    options = (None,) * 2 + (0, 0) + (None,) * 6 + (0, 0, 0.0, 0.125, -1, 0, 0.0, True)
    out, lse = operators.forward(q, k, v, *options)
    dq, _, _ = operators.backward(dout, None, q, k, v, out, lse, *options)

    exact_q, exact_k, exact_v, exact_dout = (x.cpu().double().transpose(1, 2) for x in (q, k, v, dout))
    exact_q.requires_grad_()
    future = torch.ones(200, 200, dtype=torch.bool).triu(1)
    scores = (exact_q @ exact_k.mT * 0.125).masked_fill(future, -torch.inf)
    exact_out = scores.softmax(-1) @ exact_v
    (exact_dq,) = torch.autograd.grad(exact_out, exact_q, exact_dout)
    pairs = ((out, exact_out.detach()), (dq, exact_dq))
    return tuple(float((got.cpu().transpose(1, 2) - exact).abs().max()) for got, exact in pairs)
