"""Every CUDA kernel that is compiled: the only table of them.

One row is one tile shape. setup.py compiles the row's source once per dtype (and architecture) and writes the
registry that the engine chooses from; tests check each row's shared memory against the limits of real chips.
Rows of an engine and pass stand best first: the first one that fits the problem and the device is taken.
"""

from dataclasses import asdict, dataclass

HALVES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Forward:
    """Fields and order of csrc/cuda/sm80/forward.cuh's configuration."""

    head_dim: int  # padded on chip to this: queries, keys and values
    query_tile: int
    key_tile: int
    warps: int
    stages: int  # key and value tiles in flight
    blocks: int  # resident blocks a multiprocessor that the register budget is made for


@dataclass(frozen=True)
class Backward:
    """Fields and order of csrc/cuda/sm80/backward.cuh's configuration."""

    head_dim: int
    query_tile: int
    key_tile: int
    warps: int
    stages: int  # query and dO tiles in flight
    blocks: int


@dataclass(frozen=True)
class Row:
    engine: str
    kernel: str  # "forward" or "backward": the source is <engine>/<kernel>.cu
    dtypes: tuple
    configuration: object

    def name(self, dtype):
        c = self.configuration
        return f"{self.kernel}_{dtype}_d{c.head_dim}_q{c.query_tile}_k{c.key_tile}"

    def symbol(self, dtype):
        return f"{self.engine}_{self.name(dtype)}"

    def flags(self, dtype):
        fields = ", ".join(f".{name} = {value}" for name, value in asdict(self.configuration).items())
        return [
            f"-DFLASH_DTYPE={dtype}",
            f"-DFLASH_KERNEL_SYMBOL={self.symbol(dtype)}",
            f'-DFLASH_KERNEL_NAME="{self.name(dtype)}"',
            f"-DFLASH_CONFIGURATION={{{fields}}}",
        ]


ROWS = [
    Row("sm80", "forward", HALVES, Forward(64, 128, 64, warps=4, stages=2, blocks=2)),
    Row("sm80", "forward", HALVES, Forward(128, 128, 64, warps=4, stages=1, blocks=2)),
]
