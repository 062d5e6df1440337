"""What ptxas made of the loops of Hopper's kernels: their products, and what stands between them.

    python tools/check_loops.py build/temp.*        # folders of objects

Disassembles each sm90_*.o, and prints a row for each innermost loop with matrix products (HGMMA): how many,
how many instructions, rarely wanted ones among them, and how many of those access local memory or ask for a
special register (S2R), whose answers come in the order of shared memory's, behind what the products read
there. Exit status 1, with the reasons, if a loop has not as many products as its configuration asks for, or
accesses local memory more often than allowed below, or if a kernel has products but no loop of them.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "csrc" / "cuda"))

from kernel_table import ROWS  # noqa: E402  (found on the path set just above)

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
BRANCH = re.compile(r"\bBRA(?:\.\w+)*\s.*?(0x[0-9a-f]+)$")
KERNELS = ("attention_forward", "attention_backward", "attention_key_gradients", "attention_query_gradient",
           "attention_stored_query_gradient", "bias_gradient")
DEPTH = 16  # of one product
QUERY_GRADIENT_KEYS = 64  # of both kernels for dQ alone
# A loop's accesses to local memory. A plain one makes two, once a tile of queries: the forward's four
# warpgroups at head dim 64 have 112 registers.
PLAIN_LIMIT = 2
TRANSFORMED_LIMIT = 10  # with a softcap, ALiBi or a bias


@dataclass(frozen=True)
class Loop:
    products: int
    instructions: int
    local: int
    special: int


COUNTED = (r"\bHGMMA\b", "", r"\b(LDL|STL)\b", r"\bS2U?R\b")  # of a Loop


def cuobjdump():
    if program := shutil.which("cuobjdump"):
        return program
    raise SystemExit("there is no cuobjdump on PATH: it is in CUDA, and in PyPI's nvidia-cuda-cuobjdump, "
                     "which needs nvidia-cuda-nvdisasm beside it")


def functions_of(sass):
    """{name: [(address, text)]} of cuobjdump's listing."""
    functions, lines = {}, None
    for line in sass.splitlines():
        if name := re.match(r"\s+Function : (\S+)", line):
            lines = functions.setdefault(name[1], [])
        elif lines is not None and (found := INSTRUCTION.match(line)):
            lines.append((int(found[1], 16), found[2]))
    return functions


class Graph:
    """A function's blocks, named by the index of their first instruction, and who dominates whom."""

    def __init__(self, lines):
        index_of = {address: i for i, (address, _) in enumerate(lines)}
        targets = {i: index_of[int(found[1], 16)] for i, (_, text) in enumerate(lines)
                   if (found := BRANCH.search(text)) and int(found[1], 16) in index_of}
        ends = {i for i, (_, text) in enumerate(lines) if re.search(r"\b(BRA|EXIT|RET|BRX)\b", text)}
        starts = sorted({0, *targets.values(), *(i + 1 for i in ends if i + 1 < len(lines))})
        self.instructions = {begin: range(begin, end)
                             for begin, end in zip(starts, [*starts[1:], len(lines)], strict=True)}
        self.successors = {}
        for begin, instructions in self.instructions.items():
            last = instructions[-1]
            goes_on = (last not in ends or lines[last][1].startswith("@")) and last + 1 < len(lines)
            self.successors[begin] = [*([targets[last]] if last in targets else []),
                                      *([last + 1] if goes_on else [])]
        self.predecessors = {begin: [] for begin in starts}
        for begin, successors in self.successors.items():
            for successor in successors:
                self.predecessors[successor].append(begin)
        self._number()
        self._find_dominators()

    def _number(self):
        """The blocks that can be reached, in reverse postorder."""
        seen, postorder, stack = {0}, [], [(0, iter(self.successors[0]))]
        while stack:
            block, rest = stack[-1]
            following = next((s for s in rest if s not in seen), None)
            if following is None:
                postorder.append(stack.pop()[0])
            else:
                seen.add(following)
                stack.append((following, iter(self.successors[following])))
        self.order = {block: i for i, block in enumerate(reversed(postorder))}

    def _find_dominators(self):
        """Cooper, Harvey and Kennedy, A Simple, Fast Dominance Algorithm (2001)."""
        self.dominator, changed = {0: 0}, True
        while changed:
            changed = False
            for block in list(self.order)[1:]:
                known = [p for p in self.predecessors[block] if p in self.dominator]
                new = known[0]
                for other in known[1:]:
                    while new != other:
                        later = max(new, other, key=self.order.get)
                        new, other = self.dominator[later], new if later == other else other
                if self.dominator.get(block) != new:
                    self.dominator[block], changed = new, True

    def dominates(self, block, other):
        while other != block and other != 0:
            other = self.dominator[other]
        return other == block

    def loops(self):
        """{head: the blocks of the loop}."""
        found = {}
        for block in self.order:
            for head in self.successors[block]:
                if self.dominates(head, block):
                    body, wanted = found.setdefault(head, {head}), [block]
                    while wanted:
                        if (one := wanted.pop()) not in body:
                            body.add(one)
                            wanted += [p for p in self.predecessors[one] if p in self.order]
        return found


def loops_of(lines):
    """Innermost loops with products, in the order of their addresses."""
    graph = Graph(lines)

    def texts(blocks):
        return [lines[i][1] for block in blocks for i in graph.instructions[block]]

    loops = {head: body for head, body in graph.loops().items() if any("HGMMA" in t for t in texts(body))}
    for _, body in sorted(loops.items()):
        if not any(other < body for other in loops.values()):
            yield Loop(*(sum(bool(re.search(of, text)) for text in texts(body)) for of in COUNTED))


def expected(row, function):
    """Products of a step: a number for each loop that the kernel may have."""
    c = row.configuration
    values = getattr(c, "value_dim", 0) or c.head_dim
    if "attention_query_gradient" in function:
        return {(c.head_dim + values + QUERY_GRADIENT_KEYS) // DEPTH}
    if "attention_stored_query_gradient" in function:
        return {QUERY_GRADIENT_KEYS // DEPTH}
    if "attention_key_gradients" in function:  # of dV's warpgroup and of dK's
        return {(c.head_dim + c.query_tile) // DEPTH, (values + c.query_tile) // DEPTH}
    return {
        "forward": {(c.head_dim + c.key_tile) // DEPTH},
        "backward": {products_of_backward(row, function)},
        "bias_gradient": {2 * c.head_dim // DEPTH},
    }[row.kernel]


def products_of_backward(row, function):
    c = row.configuration
    # A first turn without dQ has a dK of its own (sm90/backward_turns.cuh).
    dks = 2 if c.head_dim == 64 and "attention_backwardILb0E" in function and not c.transformed else 1
    return (2 * c.head_dim + (1 + dks) * c.query_tile + c.key_tile) // DEPTH


def listing(program, path):
    done = subprocess.run([program, "-sass", "-arch", "sm_90a", path], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{program} {path}: {done.stderr or done.stdout}")
    return done.stdout


def main(arguments=None):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("folders", type=Path, nargs="+")
    paths = {path.stem: path for folder in parser.parse_args(arguments).folders
             for path in sorted(folder.glob("sm90_*.o"))}
    rows = {row.symbol(dtype): row for row in ROWS for dtype in row.dtypes}
    program = cuobjdump()
    width = max(map(len, paths), default=4)
    print(f"{'file':{width}}  products  wanted  instructions  local  special  kernel")
    problems, loops = [], 0
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        listings = threads.map(lambda path: listing(program, path), paths.values())
        for name, sass in zip(paths, listings, strict=True):
            for function, lines in functions_of(sass).items():
                if not any("HGMMA" in text for _, text in lines):
                    continue
                found = list(loops_of(lines))
                kernel = next(kernel for kernel in KERNELS if kernel in function)
                wanted = expected(rows[name], function)
                transformed = getattr(rows[name].configuration, "transformed", False)
                limit = TRANSFORMED_LIMIT if transformed else PLAIN_LIMIT
                if not found:
                    problems.append(f"{name}: no loop of {kernel} has products")
                for loop in found:
                    loops += 1
                    products = f"{loop.products:8}  {'/'.join(map(str, sorted(wanted))):>6}"
                    others = f"{loop.instructions:12}  {loop.local:5}  {loop.special:7}"
                    print(f"{name:{width}}  {products}  {others}  {kernel}")
                    if loop.products not in wanted:
                        problems.append(f"{name}: a loop of {kernel} has {loop.products} products")
                    if loop.local > limit:
                        problems.append(f"{name}: a loop of {kernel} accesses local memory: {loop.local}")
    if not paths:
        problems.append("there is no sm90_*.o")
    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"check_loops: {'failed' if problems else 'ok'}, {loops} loops")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
