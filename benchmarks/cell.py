"""What one row of a table measures: a pass, a shape, a mask, and what scores go through."""

from dataclasses import dataclass

import torch


def whole_groups(heads, group):
    """As many heads of q, but a multiple of the group, and not none."""
    return max(group, heads - heads % group)


@dataclass(frozen=True)
class Cell:
    direction: str  # "forward" or "backward"
    dtype: str
    seqlen: int
    head_dim: int
    mask: str  # "full", "causal" or "window"
    left: int  # keys before its own that a query sees, for "window"
    batch: int
    heads: int
    softcap: float = 0  # none
    alibi: bool = False  # with the slopes of its paper (arXiv 2108.12409) for a power of 2 of heads
    group: int = 1  # heads of q for each head of k and v
    value_dim: int = 0  # head dim of v and out, if it is another
    keys: int = 0  # tokens of k and v, if they are others, which full attention may have

    @property
    def seqlen_k(self):
        return self.keys or self.seqlen

    @property
    def key_heads(self):
        return self.heads // self.group

    @property
    def out_dim(self):
        """Head dim of v and out, another or not."""
        return self.value_dim or self.head_dim

    @property
    def scores(self):
        """Visible (query, key) pairs of one head."""
        if self.mask == "window":
            return sum(min(i, self.left) + 1 for i in range(self.seqlen))
        return self.seqlen * self.seqlen_k / (2 if self.mask == "causal" else 1)

    @property
    def flops(self):
        of_head_dim, of_out_dim = (3, 2) if self.direction == "backward" else (1, 1)
        columns = of_head_dim * self.head_dim + of_out_dim * self.out_dim
        return 2 * self.batch * self.heads * self.scores * columns

    @property
    def input_bytes(self):
        """Of q, k, v and dout."""
        rows = self.heads * self.seqlen + self.key_heads * self.seqlen_k
        return self.batch * rows * (self.head_dim + self.out_dim) * getattr(torch, self.dtype).itemsize

    @property
    def label(self):
        mask = f"window {self.left}" if self.mask == "window" else self.mask
        rest = f" group {self.group}" * (self.group > 1)
        rest += f" softcap {self.softcap:g}" * (self.softcap != 0) + " ALiBi" * self.alibi
        dims = f"{self.head_dim}/{self.out_dim}" if self.out_dim != self.head_dim else str(self.head_dim)
        dims = dims.ljust(7 if self.value_dim else 3)  # a table's cells all have a value_dim, or none has
        return (f"{self.direction:8} {self.dtype:8} S={self.seqlen:<5} D={dims} {mask:10} "
                f"B={self.batch:<2} H={self.heads:<2}{rest}")

    def slopes(self, device):
        """[H], or None without ALiBi."""
        heads = torch.arange(1, self.heads + 1, device=device)
        return torch.exp2(-8 * heads / self.heads) if self.alibi else None

    def visible(self, queries, device):
        """Positions [n] -> bool [n, seqlen_k]: which keys each query sees."""
        distance = queries.to(device)[:, None] - torch.arange(self.seqlen_k, device=device)
        if self.mask == "full":
            return torch.ones_like(distance, dtype=torch.bool)
        nearest = distance >= 0
        return nearest & (distance <= self.left) if self.mask == "window" else nearest
