"""Every CUDA kernel that is compiled: the only table of them.

One row is one tile shape. setup.py compiles the row's source once per dtype (and architecture) and writes the
registry that the engine chooses from; tests check each row's shared memory against the limits of real chips.
Rows of an engine and pass stand best first: the first one that fits the problem and the device is taken and
among those of its head dim the first one whose blocks a multiprocessor's shared memory can hold all at once.
"""

from dataclasses import asdict, dataclass

HALVES = ("float16", "bfloat16")
SINGLE = ("float32",)


@dataclass(frozen=True)
class Forward:
    """Fields and order of csrc/cuda/sm80/forward_shared.cuh's configuration."""

    head_dim: int  # padded on chip to this: queries, keys and values
    query_tile: int
    key_tile: int
    warps: int
    blocks: int  # resident blocks a multiprocessor that the register budget is made for
    columns: int = 1  # warps that share a row, each with a part of the keys and of the head dim
    bias: int = 1  # its kernels take one: not those of tiles that leave no registers for it
    retries: int = 0  # values that are not finite are looked for in O, and only then in all masked tiles
    few: int = 0  # for few queries, whose heads that share keys are rows, all of the tile's
    one_wave: int = 0  # of those, for no more tiles of queries than run at once


@dataclass(frozen=True)
class HopperForward:
    """Fields and order of csrc/cuda/sm90/forward_plan.cuh's configuration."""

    head_dim: int
    key_tile: int
    warpgroups: int  # that compute, 64 queries each
    stages: int  # tiles of keys, and of values, in flight
    query_slots: int  # 64 queries each, taken by the warpgroups in turn
    registers: int = 224  # of a thread that computes; what is left is for those that copy
    stages_output: bool = False  # O leaves by way of shared memory, if there is room
    turns: bool = True  # warpgroups start their products one after the other
    transformed: bool = False  # for a softcap, ALiBi, or a scale that is not positive
    biased: bool = False  # for a bias, and those
    # Under a diagonal or a map of blocks it is for more of them: its tiles would be filled too badly.
    diagonal_keys: int = 0
    held_queries: int = 0  # so many of their columns are in registers as well
    value_dim: int = 0  # head dim of the values, if it is another
    from_queries: int = 0  # it is for so many, or more
    few: int = 0  # the same: rows that hold whole queries, a warpgroup's 64
    blocks: int = 1  # that share a multiprocessor

    @property
    def query_tile(self):
        return 64 * self.warpgroups


@dataclass(frozen=True)
class Backward:
    """Fields and order of csrc/cuda/sm80/backward.cuh's configuration."""

    head_dim: int
    query_tile: int
    key_tile: int
    warps: int
    stages: int  # query and dO tiles in flight
    blocks: int
    score_rows: int  # warps along the rows of the scores, of dK and dV, of dQ; the rest along the columns
    gradient_rows: int
    dq_rows: int
    finish_apart: int = 0  # sums of dQ are finished by a function of its own


@dataclass(frozen=True)
class HopperBackward:
    """Fields and order of csrc/cuda/sm90/backward_plan.cuh's configuration."""

    head_dim: int
    query_tile: int
    key_tile: int
    stages: int  # query and dO tiles in flight
    transformed: bool = False  # for a softcap, ALiBi, or a scale that is not positive
    biased: bool = False  # for a bias, and those, but for a softcap
    held_keys: int = 0  # so many columns of the keys, and of the values, are in registers as well
    value_dim: int = 0  # head dim of the values, if it is another

    @property
    def blocks(self):
        return 1


@dataclass(frozen=True)
class QueryGradient:
    """Fields and order of csrc/cuda/sm80/query_gradient.cuh's configuration."""

    head_dim: int
    query_tile: int
    key_tile: int
    warps: int
    stages: int  # tiles of keys and values in flight
    blocks: int


@dataclass(frozen=True)
class BiasGradient:
    """Fields and order of csrc/cuda/sm80/bias_gradient.cuh's configuration."""

    head_dim: int  # at most: it is walked in chunks
    query_tile: int
    key_tile: int
    warps: int


@dataclass(frozen=True)
class HopperBiasGradient:
    """Fields and order of csrc/cuda/sm90/bias_gradient.cuh's configuration."""

    head_dim: int
    query_tile: int
    key_tile: int
    stages: int  # tiles in flight, of queries, keys, gradients and values together


@dataclass(frozen=True)
class Row:
    engine: str
    kernel: str  # "forward", "backward", "wide_backward", "query_gradient", ...; in <engine>/<kernel>.cu
    dtypes: tuple
    configuration: object
    from_keys: int = 0  # if queries see fewer, the next row takes them
    small: bool = False  # only for chips with less shared memory than 9.0 and 10.0 have

    @property
    def which(self):
        """The pass that the engine chooses it for, "forward" or "backward"; None: others launch it."""
        return {"forward": "forward", "backward": "backward", "wide_backward": "backward"}.get(self.kernel)

    @property
    def capability(self):
        """Of the only chips whose machine code it is made of; None: all that are compiled for."""
        return {"sm90": 90}.get(self.engine)

    def name(self, dtype):
        c = self.configuration
        stages = f"_s{c.stages}" if hasattr(c, "stages") else ""
        special = ("biased", "transformed", "few")
        scores = next((f"_{name}" for name in special if getattr(c, name, False)), "")
        values = f"_v{c.value_dim}" if getattr(c, "value_dim", 0) else ""
        return f"{self.kernel}_{dtype}_d{c.head_dim}{values}_q{c.query_tile}_k{c.key_tile}{stages}{scores}"

    def symbol(self, dtype):
        return f"{self.engine}_{self.name(dtype)}"

    def macros(self, dtype):
        """What the source is compiled with. In a header: nvcc loses quotes and splits commas in a -D."""
        fields = ", ".join(f".{name} = {value:d}" for name, value in asdict(self.configuration).items())
        head_dim = self.configuration.head_dim

        def first(kernel):
            """Of the engine's own, for the head dim or the first one that is wide enough."""
            symbols = [row.symbol(dtype) for row in ROWS if (row.engine, row.kernel) == (self.engine, kernel)
                       and dtype in row.dtypes and head_dim <= row.configuration.head_dim]
            return symbols[0] if symbols else f"no_{kernel}"

        return {
            "FLASH_QUERY_GRADIENT": first("query_gradient"),
            "FLASH_BIAS_GRADIENT": first("bias_gradient"),
            "FLASH_DTYPE": dtype,
            "FLASH_KERNEL_SYMBOL": self.symbol(dtype),
            "FLASH_KERNEL_NAME": f'"{self.name(dtype)}"',
            "FLASH_CONFIGURATION": f"{{{fields}}}",
            "FLASH_FROM_KEYS": str(self.from_keys),
        }

    def header(self, dtype):
        """The macros as a file to include."""
        return "".join(f"#define {name} {text}\n" for name, text in self.macros(dtype).items())


def registry(compiled, architectures, toolkit, kernel_h):
    """The source that lists what was compiled, [(row, dtype)], in the table's order, for architectures, whose
    capability and ptx it repeats; kernel_h: csrc/cuda/kernel.h."""
    text = f'#include "{kernel_h}"\n\nnamespace flash::cuda {{\n\n'
    for kind in ("Forward", "Backward"):
        symbols = [row.symbol(dtype) for row, dtype in compiled if row.which == kind.lower()]
        text += "".join(f"extern const {kind}Kernel {symbol};\n" for symbol in symbols)
        addresses = "".join(f"&{symbol}, " for symbol in symbols)
        text += f"const {kind}Kernel* const {kind.lower()}_kernels[] = {{{addresses}nullptr}};\n\n"
    packer = "pack_mask" if architectures else ""
    text += "MaskPacker pack_mask;\n" if packer else ""
    text += f"MaskPacker* const mask_packer = {{{packer or 'nullptr'}}};\n\n"
    listed = "".join(f"{{{a.capability}, {str(a.ptx).lower()}}}, " for a in architectures)
    text += f"const Architecture architectures[] = {{{listed}{{0, false}}}};\n"
    text += f'const char* const toolkit = "{toolkit}";\n\n'
    return f"{text}}}  // namespace flash::cuda\n"


# First those for few queries, bound by the memory, so that padded columns cost them nothing. Then by head
# dims, of one Hopper's own first: what those refuse is not to go to a wider one, but for transformed
# scores of 96, which 128's take. Later rows of a head dim are for chips with less shared memory (163 KiB a
# block on 8.0, 99 on 8.6, 8.9 and 12.0) and, in the forward, for biases.
ROWS = [
    Row("sm90", "forward", HALVES,
        HopperForward(64, 128, warpgroups=2, stages=6, query_slots=2, turns=False, few=64)),
    Row("sm90", "forward", HALVES,
        HopperForward(128, 128, warpgroups=2, stages=3, query_slots=2, turns=False, few=64)),
    Row("sm90", "forward", HALVES,
        HopperForward(256, 64, warpgroups=2, stages=2, query_slots=2, turns=False, few=64)),
    Row("sm80", "forward", HALVES,
        Forward(64, 16, 128, warps=4, blocks=3, columns=4, bias=0, few=16, one_wave=1)),
    Row("sm80", "forward", HALVES, Forward(64, 16, 64, warps=4, blocks=5, columns=4, bias=0, few=16)),
    Row("sm80", "forward", HALVES,
        Forward(128, 16, 64, warps=4, blocks=3, columns=4, bias=0, few=16, one_wave=1)),
    Row("sm80", "forward", HALVES, Forward(128, 16, 32, warps=2, blocks=6, columns=2, bias=0, few=16)),
    Row("sm80", "forward", HALVES, Forward(256, 16, 32, warps=2, blocks=3, columns=2, bias=0, few=16)),
    Row("sm90", "forward", HALVES,
        HopperForward(64, 128, warpgroups=3, stages=4, query_slots=6, registers=160, stages_output=True,
                      diagonal_keys=1280), from_keys=768),
    Row("sm90", "forward", HALVES,
        HopperForward(64, 64, warpgroups=4, stages=4, query_slots=8, registers=112, stages_output=True,
                      turns=False, from_queries=129)),
    Row("sm90", "forward", HALVES,
        HopperForward(64, 64, warpgroups=2, stages=3, query_slots=4, registers=96, stages_output=True,
                      turns=False, blocks=2), from_keys=65),
    Row("sm90", "forward", HALVES,
        HopperForward(64, 64, warpgroups=2, stages=4, query_slots=4, stages_output=True), from_keys=65),
    Row("sm90", "forward", HALVES,
        HopperForward(64, 128, warpgroups=2, stages=4, query_slots=4, transformed=True)),
    Row("sm90", "forward", HALVES,
        HopperForward(64, 128, warpgroups=2, stages=4, query_slots=4, transformed=True, biased=True)),
    Row("sm80", "forward", HALVES,
        Forward(64, 128, 128, warps=4, blocks=2, bias=0, retries=1), from_keys=512),
    Row("sm80", "forward", HALVES, Forward(64, 64, 64, warps=4, blocks=4, retries=1)),
    Row("sm90", "forward", HALVES,
        HopperForward(96, 112, warpgroups=3, stages=2, query_slots=6, registers=160, diagonal_keys=3072),
        from_keys=2048),
    Row("sm90", "forward", HALVES,
        HopperForward(96, 128, warpgroups=2, stages=2, query_slots=4, stages_output=True, held_queries=64)),
    Row("sm90", "forward", HALVES,
        HopperForward(128, 80, warpgroups=3, stages=4, query_slots=3, registers=152), from_keys=2048),
    Row("sm90", "forward", HALVES,
        HopperForward(128, 128, warpgroups=2, stages=2, query_slots=4, stages_output=True, held_queries=32)),
    Row("sm90", "forward", HALVES,
        HopperForward(128, 128, warpgroups=2, stages=2, query_slots=4, transformed=True)),
    Row("sm90", "forward", HALVES,
        HopperForward(128, 128, warpgroups=2, stages=2, query_slots=2, transformed=True, biased=True)),
    Row("sm80", "forward", HALVES, Forward(96, 128, 64, warps=4, blocks=2, bias=0)),
    Row("sm80", "forward", HALVES, Forward(128, 128, 64, warps=4, blocks=2, bias=0)),
    Row("sm80", "forward", HALVES, Forward(128, 128, 32, warps=4, blocks=2)),
    Row("sm90", "forward", HALVES,
        HopperForward(192, 128, warpgroups=2, stages=2, query_slots=2, value_dim=128)),
    Row("sm90", "forward", HALVES,
        HopperForward(192, 112, warpgroups=2, stages=2, query_slots=2, diagonal_keys=512), from_keys=513),
    Row("sm90", "forward", HALVES, HopperForward(192, 64, warpgroups=2, stages=3, query_slots=3)),
    Row("sm90", "forward", HALVES,
        HopperForward(192, 112, warpgroups=2, stages=2, query_slots=2, transformed=True)),
    Row("sm90", "forward", HALVES,
        HopperForward(192, 64, warpgroups=2, stages=3, query_slots=2, transformed=True, biased=True)),
    Row("sm80", "forward", HALVES, Forward(192, 128, 64, warps=8, blocks=1, columns=2, retries=1)),
    Row("sm80", "forward", HALVES, Forward(192, 128, 32, warps=8, blocks=1), small=True),
    Row("sm90", "forward", HALVES,
        HopperForward(256, 64, warpgroups=2, stages=2, query_slots=3, held_queries=64)),
    Row("sm90", "forward", HALVES,
        HopperForward(256, 80, warpgroups=2, stages=2, query_slots=2, transformed=True)),
    Row("sm90", "forward", HALVES,
        HopperForward(256, 64, warpgroups=2, stages=2, query_slots=2, transformed=True, biased=True)),
    Row("sm80", "forward", HALVES,
        Forward(256, 128, 64, warps=8, blocks=1, columns=2, bias=0, retries=1)),
    Row("sm80", "forward", HALVES, Forward(256, 128, 32, warps=8, blocks=1, columns=2)),
    Row("sm80", "forward", HALVES, Forward(256, 64, 32, warps=4, blocks=1), small=True),
    Row("sm90", "backward", HALVES, HopperBackward(64, 128, 128, stages=3), from_keys=65),
    Row("sm90", "backward", HALVES, HopperBackward(64, 128, 128, stages=2, transformed=True), from_keys=224),
    Row("sm90", "backward", HALVES, HopperBackward(64, 128, 128, stages=2, transformed=True, biased=True)),
    Row("sm80", "backward", HALVES,
        Backward(64, 128, 128, 8, 2, 1, score_rows=4, gradient_rows=4, dq_rows=4), from_keys=1024),
    Row("sm80", "backward", HALVES, Backward(64, 64, 64, 4, 2, 3, score_rows=2, gradient_rows=2, dq_rows=2)),
    Row("sm90", "backward", HALVES, HopperBackward(96, 64, 128, stages=3, held_keys=64)),
    Row("sm90", "backward", HALVES, HopperBackward(128, 64, 128, stages=3)),
    Row("sm90", "backward", HALVES, HopperBackward(128, 64, 128, stages=3, transformed=True)),
    Row("sm90", "backward", HALVES, HopperBackward(128, 64, 128, stages=2, transformed=True, biased=True)),
    Row("sm80", "backward", HALVES, Backward(96, 64, 64, 4, 2, 2, score_rows=2, gradient_rows=4, dq_rows=4)),
    Row("sm80", "backward", HALVES,
        Backward(128, 64, 128, 8, 2, 1, score_rows=2, gradient_rows=4, dq_rows=2, finish_apart=1)),
    Row("sm80", "backward", HALVES,
        Backward(128, 64, 64, 8, 1, 1, score_rows=4, gradient_rows=4, dq_rows=2), small=True),
    Row("sm90", "wide_backward", HALVES, HopperBackward(192, 64, 64, stages=3, held_keys=192, value_dim=128)),
    Row("sm90", "wide_backward", HALVES, HopperBackward(192, 64, 64, stages=3, held_keys=192)),
    Row("sm90", "wide_backward", HALVES,
        HopperBackward(192, 64, 64, stages=3, transformed=True, held_keys=192)),
    Row("sm80", "backward", HALVES, Backward(192, 64, 64, 8, 2, 1, score_rows=4, gradient_rows=4, dq_rows=4)),
    Row("sm80", "backward", HALVES,
        Backward(192, 32, 32, 4, 2, 1, score_rows=2, gradient_rows=2, dq_rows=2), small=True),
    Row("sm90", "wide_backward", HALVES, HopperBackward(256, 48, 64, stages=3, held_keys=160)),
    Row("sm90", "wide_backward", HALVES,
        HopperBackward(256, 48, 64, stages=3, transformed=True, held_keys=160)),
    Row("sm80", "backward", HALVES, Backward(256, 64, 64, 8, 2, 1, score_rows=2, gradient_rows=2, dq_rows=2)),
    Row("sm80", "backward", HALVES,
        Backward(256, 64, 64, 8, 1, 1, score_rows=2, gradient_rows=2, dq_rows=2), small=True),
    Row("sm80", "backward", HALVES,
        Backward(256, 32, 32, 4, 1, 1, score_rows=2, gradient_rows=2, dq_rows=2), small=True),
    Row("sm80", "forward", SINGLE, Forward(64, 64, 64, warps=4, blocks=2)),
    Row("sm80", "forward", SINGLE, Forward(128, 64, 32, warps=4, blocks=1)),
    Row("sm80", "forward", SINGLE, Forward(256, 32, 16, warps=2, blocks=1)),
    Row("sm80", "backward", SINGLE, Backward(64, 32, 64, 4, 2, 1, score_rows=2, gradient_rows=4, dq_rows=2)),
    Row("sm80", "backward", SINGLE, Backward(128, 32, 32, 4, 1, 1, score_rows=2, gradient_rows=2, dq_rows=2)),
    Row("sm80", "backward", SINGLE, Backward(256, 32, 32, 4, 1, 1, score_rows=2, gradient_rows=2, dq_rows=2)),
    # A bias' gradient: Hopper's own for each head dim of its backward that takes one, the other for all.
    Row("sm90", "bias_gradient", HALVES, HopperBiasGradient(64, 128, 128, stages=8)),
    Row("sm90", "bias_gradient", HALVES, HopperBiasGradient(128, 128, 128, stages=5)),
    Row("sm80", "bias_gradient", HALVES + SINGLE, BiasGradient(256, 64, 64, warps=4)),
    # dQ of deterministic=True, for every head dim of the backward; 96 KiB at most.
    Row("sm80", "query_gradient", HALVES, QueryGradient(64, 128, 64, warps=4, stages=2, blocks=2)),
    Row("sm80", "query_gradient", HALVES, QueryGradient(96, 64, 64, warps=4, stages=2, blocks=2)),
    Row("sm80", "query_gradient", HALVES, QueryGradient(128, 128, 32, warps=4, stages=2, blocks=2)),
    Row("sm80", "query_gradient", HALVES, QueryGradient(192, 64, 32, warps=4, stages=2, blocks=2)),
    Row("sm80", "query_gradient", HALVES, QueryGradient(256, 64, 32, warps=4, stages=1, blocks=2)),
    Row("sm80", "query_gradient", SINGLE, QueryGradient(64, 32, 32, warps=2, stages=2, blocks=1)),
    Row("sm80", "query_gradient", SINGLE, QueryGradient(128, 32, 32, warps=2, stages=2, blocks=1)),
    Row("sm80", "query_gradient", SINGLE, QueryGradient(256, 32, 16, warps=2, stages=1, blocks=1)),
]
