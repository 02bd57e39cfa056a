# SPDX-License-Identifier: Apache-2.0
"""Bytes and floating-point operations of the kernels of a compiled program, from its optimised HLO.

The bytes of a fusion are the bytes of its operands and its result. If the fusion only slices an operand or gathers from
it, only the slices count. A Pallas kernel is a custom call, whose operands count whole. Arrays which it updates in
place do not count, since it touches a small part of them. Arrays of a pool do not count either, since only the caller
knows the part in use.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection
from typing import NamedTuple

PALLAS = "__gpu$xla.gpu.triton", "mosaic_gpu_v2"  # targets of custom calls
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_HEAD = re.compile(r" *(?:ROOT )?%?([\w.-]+) = ")
_SLICES = "slice", "dynamic-slice", "gather"


class Instruction(NamedTuple):
    """An instruction.

    Attributes:
      type: type of its result, as HLO writes it. A tuple's is in parentheses.
      opcode: its operation, for example fusion.
      operands: names of its operands, or the number of a parameter.
      attributes: the rest of the line.
    """

    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


class Cost(NamedTuple):
    """The minimum work of a kernel.

    Attributes:
      bytes: bytes read and written.
      flops: operations of matrix products.
      reads_pool: whether an operand is an array of a pool which it does not update.
    """

    bytes: int
    flops: int = 0
    reads_pool: bool = False


def parse_instruction(line: str) -> tuple[str, Instruction] | None:
    """The name and the instruction of a line, or None if it has no instruction."""
    if not (head := _HEAD.match(line)):
        return None
    kind, rest = _until(line[head.end() :], " ")
    opcode, _, rest = rest.partition("(")
    inside, attributes = _until(rest, ")")
    operands = re.findall(r"%([\w.-]+)", inside) or [inside]
    return head[1], Instruction(kind, opcode.strip(), tuple(operands), attributes)


def _until(text: str, end: str) -> tuple[str, str]:
    """The text before the first `end` outside of parentheses, and the text after it."""
    depth = 0
    for position, letter in enumerate(text):
        if depth == 0 and letter == end:
            return text[:position], text[position + 1 :]
        depth += {"(": 1, ")": -1}.get(letter, 0)
    return text, ""


def _itemsize_bits(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) if bits else 8 * (dtype == "pred")


def array_bytes(kind: str) -> int:
    """Bytes of all arrays of a type."""
    arrays = _ARRAY.findall(kind)
    return sum(-(-_itemsize_bits(dtype) * math.prod(_dims(shape)) // 8) for dtype, shape in arrays)


def _dims(shape: str) -> list[int]:
    return [int(size) for size in shape.split(",") if size]


def _shape(kind: str) -> list[int]:
    """The dimensions in the type of an array."""
    ((_, shape),) = _ARRAY.findall(kind)
    return _dims(shape)


class Module:
    """The computations of a program.

    Args:
      hlo: its optimised HLO.
      pools: bytes of the arrays with K/V or scales. Nothing else may have as many.

    Raises:
      ValueError: if two instructions have the same name.
    """

    def __init__(self, hlo: str, pools: Collection[int] = ()):
        self.pools, self.computations, self.home = pools, {}, {}
        name = ""
        for line in hlo.splitlines():
            if line.endswith("{") and (head := re.match(r"(?:ENTRY )?%?([\w.-]+) \(", line)):
                name = head[1]
                self.computations[name] = {}
            elif parsed := parse_instruction(line):
                if parsed[0] in self.home:
                    raise ValueError(f"two instructions are named {parsed[0]}")
                self.computations[name][parsed[0]] = parsed[1]
                self.home[parsed[0]] = name

    def _of(self, name: str) -> Instruction:
        return self.computations[self.home[name]][name]

    @functools.cached_property
    def users(self) -> dict[str, list[str]]:
        """Instructions by the name of each of their operands."""
        users: dict[str, list[str]] = {}
        for computation in self.computations.values():
            for name, instruction in computation.items():
                for operand in dict.fromkeys(instruction.operands):
                    users.setdefault(operand, []).append(name)
        return users

    def is_in(self, name: str, scope: str) -> bool:
        """Whether an instruction was traced in a scope. An instruction without a trace belongs to its users' scope."""
        traced = re.search(r'op_name="([^"]+)"', self._of(name).attributes)
        if traced:
            return scope in traced[1]
        return any(self.is_in(user, scope) for user in self.users.get(name, []))

    def cost(self, name: str) -> Cost:
        """The bytes and operations of a kernel or a copy.

        Raises:
          ValueError: for a custom call of a library, which may compute anything, and for a kernel of XLA over a pool,
            which may touch any part of it.
        """
        instruction = self._of(name)
        if instruction.opcode == "custom-call":
            return self._pallas_cost(instruction)
        operands = [self._of(operand).type for operand in instruction.operands if operand in self.home]
        if instruction.opcode != "copy" and {array_bytes(kind) for kind in operands} & set(self.pools):
            raise ValueError(f"{name}: a kernel of XLA's over a pool: {instruction.opcode} of {operands}"[:200])
        if instruction.opcode != "fusion":
            flops = self._product_flops(instruction) if instruction.opcode == "dot" else 0
            return Cost(sum(map(array_bytes, [*operands, instruction.type])), flops)
        (called,) = re.findall(r"calls=%?([\w.-]+)", instruction.attributes)
        inside = self.computations[called]
        parameters = {int(x.operands[0]): key for key, x in inside.items() if x.opcode == "parameter"}
        read = sum(self._read_bytes(parameters[operand_index]) for operand_index in range(len(operands)))
        flops = sum(self._product_flops(instruction) for instruction in inside.values() if instruction.opcode == "dot")
        return Cost(read + array_bytes(instruction.type), flops)

    def _pallas_cost(self, call: Instruction) -> Cost:
        target = re.search(r'custom_call_target="([^"]+)"', call.attributes)
        if not target or target[1] not in PALLAS:
            raise ValueError(f"a custom call that is not understood: {call.attributes[:200]}")
        aliases = re.search(r"output_to_operand_aliasing=\{(.*?\))\}, ", call.attributes)
        in_place = {int(operand_index) for operand_index in re.findall(r"\((\d+),", aliases[1] if aliases else "")}
        sizes = [array_bytes(self._of(operand).type) for operand in call.operands if operand in self.home]
        read = [size for operand_index, size in enumerate(sizes) if operand_index not in in_place]
        written = array_bytes(call.type) - sum(sizes[operand_index] for operand_index in in_place)
        not_pools = [size for size in read if size not in self.pools]
        return Cost(sum(not_pools) + written, reads_pool=len(not_pools) < len(read))

    def _read_bytes(self, name: str) -> int:
        """The bytes which a fusion reads of an array inside it: all, or no more than its slices."""
        all_bytes, read = array_bytes(self._of(name).type), 0
        for user in self.users.get(name, []):
            instruction = self._of(user)
            if instruction.opcode in _SLICES and instruction.operands[0] == name:
                read += array_bytes(instruction.type)
            elif instruction.opcode == "bitcast":
                read += self._read_bytes(user)
            else:
                return all_bytes
        return min(read, all_bytes)

    def _product_flops(self, product: Instruction) -> int:
        (axes,) = re.findall(r"lhs_contracting_dims=\{([\d,]*)\}", product.attributes)
        left_shape = _shape(self._of(product.operands[0]).type)
        return 2 * math.prod(_shape(product.type)) * math.prod(left_shape[axis] for axis in _dims(axes))
