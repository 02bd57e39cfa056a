# SPDX-License-Identifier: Apache-2.0
"""Bytes and products of kernels, from a program by hand."""

import pytest

from tests.kernels.gpu_hlo import Cost, Module, array_bytes, parse_instruction

# One instruction a line, as XLA writes them.
HLO = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={()->f32[2]{0}}

FileNames
1 "step.py"

%fused_take (table: bf16[100,8], ids: s32[2]) -> bf16[2,8] {
  %table = bf16[100,8]{1,0} parameter(0)
  %view = bf16[10,10,8]{2,1,0} bitcast(%table)
  %ids = s32[2]{0} parameter(1)
  ROOT %gather = bf16[2,8]{1,0} gather(%view, %ids), offset_dims={1}
}

%fused_dot (x: bf16[2,8], w: bf16[8,32]) -> f32[4,2,32] {
  %x = bf16[2,8]{1,0} parameter(0)
  %w = bf16[8,32]{1,0} parameter(1)
  %parts = bf16[4,2,2]{2,1,0} bitcast(%x)
  %rows = bf16[4,2,32]{2,1,0} bitcast(%w)
  ROOT %dot = f32[4,2,32]{2,1,0} dot(%parts, %rows), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}
}

%fused_sum (sums: f32[4,2,32]) -> (f32[2,16], f32[2,16]) {
  %sums = f32[4,2,32]{2,1,0} parameter(0)
  %k = f32[4,2,16]{2,1,0} slice(%sums), slice={[0:4], [0:2], [0:16]}
  %again = f32[4,2,16]{2,1,0} slice(%sums), slice={[0:4], [0:2], [0:16]}
  ROOT %pair = (f32[2,16]{1,0}, f32[2,16]{1,0}) tuple(%k, %again)
}

%fused_all (sums.1: f32[4,2,32]) -> f32[4,2,32] {
  %sums.1 = f32[4,2,32]{2,1,0} parameter(0)
  %part = f32[4,2,16]{2,1,0} slice(%sums.1), slice={[0:4], [0:2], [0:16]}
  ROOT %negate = f32[4,2,32]{2,1,0} negate(%sums.1)
}

ENTRY %main (embedding: bf16[100,8], ids.1: s32[2]) -> bf16[2,8] {
  %embedding = bf16[100,8]{1,0} parameter(0)
  %ids.1 = s32[2]{0} parameter(1)
  %weights = bf16[8,32]{1,0} parameter(2)
  %pool = s8[50,128]{1,0} parameter(3)
  %take = bf16[2,8]{1,0} fusion(%embedding, %ids.1), kind=kLoop, calls=%fused_take, metadata={op_name="run/model/take"}
  %product = f32[4,2,32]{2,1,0} fusion(%take, %weights), kind=kCustom, calls=%fused_dot
  %sum = (f32[2,16]{1,0}, /*index=1*/f32[2,16]) fusion(%product), calls=%fused_sum, metadata={op_name="run/model/add"}
  %negated = f32[4,2,32]{2,1,0} fusion(%product), kind=kLoop, calls=%fused_all, metadata={op_name="run/choose"}
  %write = (s8[50,128]{1,0}, s32[2]{0}) custom-call(%ids.1, %sum, %pool), TRITON, ALIASES, api_version=1
  %written = s8[50,128]{1,0} get-tuple-element(%write), index=0
  %attend = bf16[2,8]{1,0} custom-call(%ids.1, %take, %written), TRITON, operand_layout_constraints={s32[2]{0}}
  %library = bf16[2,8]{1,0} custom-call(%take), custom_call_target="__cublas$gemm"
  %sliced = s8[1,128]{1,0} dynamic-slice(%pool, %ids.1), dynamic_slice_sizes={1,128}
  %copied = s8[50,128]{1,0} copy(%pool)
  ROOT %copy = bf16[2,8]{1,0} copy(%attend)
}
""".replace("TRITON", 'custom_call_target="__gpu$xla.gpu.triton"').replace(
    "ALIASES", "output_to_operand_aliasing={{0}: (2, {}), {1}: (0, {})}"
)
MODULE = Module(HLO, {50 * 128})


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("take", Cost(32 + 8 + 32)),  # what is gathered, ids, result
        ("product", Cost(32 + 512 + 1024, flops=2 * 4 * 2 * 32 * 2)),
        ("sum", Cost(2 * 512 + 256)),  # two slices of 16 columns
        ("negated", Cost(1024 + 1024)),  # all, beside a slice
        ("write", Cost(256)),  # all but the sums is updated in place
        ("attend", Cost(8 + 32 + 32, reads_pool=True)),
        ("copy", Cost(64)),
        ("copied", Cost(2 * 50 * 128)),
    ],
)
def test_bytes_and_products_of_kernels(name, wanted):
    assert MODULE.cost(name) == wanted


def test_what_may_touch_anything_is_an_error():
    with pytest.raises(ValueError, match=r"not understood: .*cublas"):
        MODULE.cost("library")
    with pytest.raises(ValueError, match="sliced: a kernel of XLA's over a pool: dynamic-slice of"):
        MODULE.cost("sliced")
    with pytest.raises(ValueError, match="two instructions are named copy"):
        Module(HLO.replace("%library", "%copy"))


def test_a_kernel_without_a_trace_belongs_where_its_result_is_used():
    assert MODULE.is_in("take", "/model/") and MODULE.is_in("product", "/model/")
    assert not MODULE.is_in("negated", "/model/") and not MODULE.is_in("attend", "/model/")


def test_arrays_of_all_types_are_measured():
    assert array_bytes("(pred[3]{0}, f8e4m3fn[2,2]{1,0}, s4[5], f32[], c64[2], token[])") == 3 + 4 + 3 + 4 + 16
    assert parse_instruction("  ROOT %a.1 = (f32[2]{0}, s32[]) fusion(), kind=kLoop")[1].type == "(f32[2]{0}, s32[])"
    assert parse_instruction("FileNames") is None
