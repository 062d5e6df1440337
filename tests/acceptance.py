"""When is a result accurate enough? Row by row, against float64.

exact     the reference in float64
standard  the reference in the dtype of the inputs: what a user has without this library
stored    the reference in float32, gradients recomputed from the stored out (in the dtype of the inputs) and
          lse (fp32). Any backward that stores no [Sq, Sk] matrix has these errors, and they show where the
          textbook's gradient cancels exactly: a row that sees one key has P = 1 and dS = dP - rowsum(dO * O),
          which is 0, but O has been rounded, and the two sums over the head dimension have different orders.

The error of a row is its largest absolute deviation from exact. Its standard error is the larger one of the
two results above. With ulp = eps * max|exact row|, one unit in the last place of the row's largest value:

    median of errors   <= 1.5 * median of standard errors   + median ulp     (of 100 rows and more)
    99th percentile    <= 1.5 * 99th percentile of standard + median ulp     (of 500 rows and more, both not
                                                                              counting rows that are all zero)
    every row's error  <= 8 * nearby(standard error)        + its ulp

nearby() is the largest standard error within 16 rows, in any batch entry and head. Two programs of equal
accuracy round differently, so in one row of thousands either may be twice as lucky as the other; their
distributions are what 1.5 can be asked of. The last line finds the bad row that no statistic shows, where a
mistake is of the order of the row itself, a million times more in float32. It is
local, so that rows with few keys (large values, large errors) don't excuse the others.

lse is fp32 whatever the inputs: its standard is the float32 formula on the same inputs. For float64 inputs
exact and standard would coincide, so the budget is the float32 formula's error times eps64 / eps32, and twice
that, because exact has such an error itself. Its ulp is never below eps: a sum that is right to a relative
eps has a logarithm that is right to an absolute eps.

On a GPU, products of tensor cores allow more ulps, in lse for half-precision inputs and everywhere for
float32: they truncate while they add up a dot product, 16 (8) products at a time, so their error is one of
the largest partial sum, whatever the sum comes to; and of float32's operands 22 bits enter a product, 3xTF32.
That shows in sums of few terms, as in a row that sees one key, where the standard is exact; with more terms
float32's errors are below the standard's. So float32 there has SINGLE_FACTOR in place of 1.5. (Where inputs
are half precision, out and the gradients are rounded to that.)
"""

import dataclasses
import functools

import torch

FACTOR, SINGLE_FACTOR = 1.5, 2.5
ROW_FACTOR = 8
NEIGHBOURS = 16
HALF_LSE_ULPS, SINGLE_LSE_ULPS, SINGLE_ULPS = 16, 8, 4
ROWS_FOR_PERCENTILE = {50: 100, 99: 500}


@dataclasses.dataclass
class Result:
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor = None
    dk: torch.Tensor = None
    dv: torch.Tensor = None


def evaluate(attend, q, k, v, dout=None, dlse=None, dtype=torch.float64):
    """attend(q, k, v) -> out, lse and, if dout is given, its gradients, in dtype."""
    leaves = [x.detach().to(dtype).requires_grad_(dout is not None) for x in (q, k, v)]
    out, lse = attend(*leaves)
    if dout is None:
        return Result(out, lse)
    dlse = torch.zeros_like(lse) if dlse is None else dlse.to(dtype)
    gradients = torch.autograd.grad((out, lse), leaves, (dout.to(dtype), dlse))
    return Result(out.detach(), lse.detach(), *gradients)


def rows_first(name, x):
    """[batch, row, head, value]; lse has one value a row."""
    if name == "lse":
        x = x.movedim(-1, -2).unsqueeze(-1)
    return (x if x.dim() == 4 else x[None]).double()


def row_errors(name, x, exact):
    difference = rows_first(name, x) - rows_first(name, exact)
    # -inf minus -inf: equal. Any other NaN has to stay.
    same = rows_first(name, x) == rows_first(name, exact)
    return torch.where(same, 0.0, difference.abs()).amax(dim=-1)  # [batch, row, head]


def nearby_maximum(errors):
    worst = errors.amax(dim=(0, 2))
    pooled = torch.nn.functional.max_pool1d(worst[None, None], 2 * NEIGHBOURS + 1, 1, NEIGHBOURS)
    return pooled[0, 0][None, :, None]


def ulp_of_rows(name, exact, dtype):
    x = rows_first(name, exact)
    maximum = torch.where(x.isfinite(), x.abs(), 0.0).amax(dim=-1)
    return torch.finfo(dtype).eps * (maximum.clamp(min=1) if name == "lse" else maximum)


def ulps(name, x, input_dtype):
    """How many units in the last place a row's error may be besides the standard's."""
    if not x.is_cuda or input_dtype == torch.float64:
        return 1
    if input_dtype == torch.float32:
        return SINGLE_LSE_ULPS if name == "lse" else SINGLE_ULPS
    return HALF_LSE_ULPS if name == "lse" else 1


class Expected:
    """What attend(q, k, v) has to give, and how far from it a result may be."""

    def __init__(self, attend, q, k, v, dout=None, dlse=None):
        self.dtype = q.dtype
        self.lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        standard_dtype = torch.float32 if q.dtype == torch.float64 else q.dtype
        self.unit = 1.0
        if q.dtype == torch.float64:
            self.unit = 2 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        self.exact = evaluate(attend, q, k, v, dout, dlse)
        self.standards = [evaluate(attend, q, k, v, dout, dlse, standard_dtype)]
        if dout is not None:
            recomputing = functools.partial(attend, stored_dtype=standard_dtype)
            self.standards.append(evaluate(recomputing, q, k, v, dout, dlse, torch.float32))
        self.lse_standard = evaluate(attend, q, k, v, dtype=torch.float32)

    def check(self, **actual):
        """actual: out=, lse=, dq=, dk=, dv=, any of them. Raises AssertionError naming the worst row."""
        for name, x in actual.items():
            self.check_tensor(name, x)

    def check_tensor(self, name, x):
        exact = getattr(self.exact, name)
        assert x.shape == exact.shape, f"{name}: shape {tuple(x.shape)}, expected {tuple(exact.shape)}"
        dtype = self.lse_dtype if name == "lse" else self.dtype
        assert x.dtype == dtype, f"{name}: dtype {x.dtype}, expected {dtype}"
        if x.numel() == 0:
            return
        standards = [self.lse_standard] if name == "lse" else self.standards
        standard = torch.stack([row_errors(name, getattr(s, name), exact) for s in standards]).amax(dim=0)
        # A standard that overflowed proves nothing about its row, and must not excuse the neighbours.
        standard = self.unit * torch.where(standard.isfinite(), standard, 0.0)
        ulp = ulps(name, x, self.dtype) * ulp_of_rows(name, exact, dtype)
        factor = SINGLE_FACTOR if x.is_cuda and self.dtype == torch.float32 else FACTOR
        check_errors(name, row_errors(name, x, exact), standard, ulp, factor)


def check_errors(name, error, standard, ulp, factor=FACTOR):
    """All [batch, row, head]."""
    budget = ROW_FACTOR * nearby_maximum(standard) + ulp
    bad = ~(error <= budget)
    if bad.any():
        batch, row, head = place = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.numel()} rows inaccurate, first at batch {batch}, row {row}, "
            f"head {head}: error {error[place]:.3e}, budget {budget[place]:.3e}, ulp {ulp[place]:.3e}")
    error, standard, ulp = (x[ulp > 0] for x in (error, standard, ulp))  # rows that are not exactly zero
    for percentile, rows in ROWS_FOR_PERCENTILE.items():
        if error.numel() < rows:
            continue
        actual, usual = (x.quantile(percentile / 100) for x in (error, standard))
        assert actual <= factor * usual + ulp.median(), (
            f"{name}: percentile {percentile} of row errors is {actual:.3e}, the standard's {usual:.3e}")
