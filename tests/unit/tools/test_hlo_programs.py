"""Readers of compiled GPU programs, on short texts in XLA's format."""

import pytest

from tools.hlo_programs import Launches, WeightWork, count_launches, find_weight_work

# As jaxlib 0.10.2 writes it: the first label of a loop has no indentation.
THUNKS = """\
000: kCommandBuffer [source       | next=004 (1)]
    001: kCustomKernel [source        | next=002 (1)] loop_convert_fusion grid: [8, 1, 1] threads: [128, 1, 1]
    002: kCublasLtMatmul [prev=001 (1) | next=003 (1)] kCublasLtMatmul
    003: kCopy         [prev=002 (1)  | sink        ] kCopy
004: kWhile        [prev=000 (1) | next=012 (1)]
condition:
    005: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        006: kDynamicSliceFusion [source       | next=011 (1)] params=1, results=1
            007: kCopy [source | sink] kCopy
        011: kConditional        [prev=006 (1) | sink]
          false_branch:
            008: kCustomKernel [source | next=009 (1)] gemm_fusion_dot grid: [448, 1, 1] threads: [64, 1, 1]
            009: kCustomKernel [prev=008 (1) | sink] loop_add_fusion grid: [13, 1, 1] threads: [128, 1, 1]
          true_branch:
            010: kCustomKernel [source | sink] loop_add_fusion_1 grid: [13, 1, 1] threads: [128, 1, 1]
    013: kAsyncDone [source | sink]
012: kCustomKernel [prev=004 (1) | sink] loop_add_fusion_2 grid: [3, 1, 1] threads: [128, 1, 1]
"""

HLO = """\
HloModule jit_run, is_scheduled=true

%fused (param_0: bf16[512,1024], param_1: bf16[512,1024]) -> bf16[1024,1024] {
  %param_0 = bf16[512,1024]{1,0} parameter(0)
  %param_1 = bf16[512,1024]{1,0} parameter(1)
  ROOT %concatenate.1 = bf16[1024,1024]{1,0} concatenate(%param_0, %param_1), dimensions={0}
}

%yes (arg: (bf16[1024,1024], f32[4,1024])) -> (f32[4,1024]) {
  %arg = (bf16[1024,1024]{1,0}, f32[4,1024]{1,0}) parameter(0)
  %weight = bf16[1024,1024]{1,0} get-tuple-element(%arg), index=0
  %convert.1 = f32[1024,1024]{1,0} convert(%weight), metadata={op_name="jit(run)/while/body/convert"}
  %x.1 = f32[4,1024]{1,0} get-tuple-element(%arg), index=1
  %dot.1 = f32[4,1024]{1,0} dot(%x.1, %convert.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out.1 = (f32[4,1024]{1,0}) tuple(%dot.1)
}

%no (arg.1: f32[4,1024]) -> (f32[4,1024]) {
  %arg.1 = f32[4,1024]{1,0} parameter(0)
  ROOT %out.2 = (f32[4,1024]{1,0}) tuple(%arg.1)
}

%body (state: (s32[], f32[4,1024], bf16[1024,1024])) -> (s32[], f32[4,1024], bf16[1024,1024]) {
  %state = (s32[], f32[4,1024]{1,0}, bf16[1024,1024]{1,0}) parameter(0)
  %step = s32[] get-tuple-element(%state), index=0
  %next = s32[] add(%step, %step)
  %x = f32[4,1024]{1,0} get-tuple-element(%state), index=1
  %kept = bf16[1024,1024]{1,0} get-tuple-element(%state), index=2
  %is_last = pred[] compare(%step, %next), direction=LT
  %branch = (bf16[1024,1024]{1,0}, f32[4,1024]{1,0}) tuple(%kept, %x)
  %cond = (f32[4,1024]{1,0}) conditional(%is_last, %branch, %x), true_computation=%yes, false_computation=%no
  %chosen = f32[4,1024]{1,0} get-tuple-element(%cond), index=0
  ROOT %result = (s32[], f32[4,1024]{1,0}, bf16[1024,1024]{1,0}) tuple(%next, %chosen, %kept)
}

%condition (state.1: (s32[], f32[4,1024], bf16[1024,1024])) -> pred[] {
  %state.1 = (s32[], f32[4,1024]{1,0}, bf16[1024,1024]{1,0}) parameter(0)
  %step.1 = s32[] get-tuple-element(%state.1), index=0
  %ten = s32[] constant(10)
  ROOT %compare = pred[] compare(%step.1, %ten), direction=LT
}

ENTRY %main (q: bf16[512,1024], k: bf16[512,1024], /*index=2*/x: f32[4,1024]) -> f32[4,1024] {
  %q = bf16[512,1024]{1,0} parameter(0), sharding={replicated}, metadata={op_name="arrays[0]"}
  %k = bf16[512,1024]{1,0} parameter(1), sharding={replicated}, metadata={op_name="arrays[7]"}
  %input = f32[4,1024]{1,0} parameter(2), sharding={replicated}, metadata={op_name="raw.state"}
  %zero = s32[] constant(0)
  %joined = bf16[1024,1024]{1,0} fusion(%q, %k), kind=kLoop, calls=%fused, metadata={op_name="jit(run)/concatenate"}
  %moved = f32[4,1024]{1,0} copy(%input)
  %before = (s32[], f32[4,1024]{1,0}, bf16[1024,1024]{1,0}) tuple(%zero, %moved, %joined)
  %loop = (s32[], f32[4,1024]{1,0}, bf16[1024,1024]{1,0}) while(%before), condition=%condition, body=%body
  ROOT %last = f32[4,1024]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_launches_are_counted_by_region_and_by_command_buffer():
    found = count_launches(THUNKS)
    assert found == {
        "": Launches(kernels=3, copies=1, command_buffers=1, nodes=3),
        "condition": Launches(kernels=1),
        "body": Launches(copies=1, command_buffers=1, nodes=1),
        "body/false_branch": Launches(kernels=2, nodes=2),
        "body/true_branch": Launches(kernels=1, nodes=1),
    }
    assert [found[region].outside for region in ("", "condition", "body")] == [1, 1, 0]


def test_work_on_weights_is_followed_into_loops_and_branches():
    names = ("arrays[0]", "arrays[7]")
    assert find_weight_work(HLO) == [
        WeightWork("joined", "jit(run)/concatenate", names, 2 * 1024 * 1024, ""),
        WeightWork("convert.1", "jit(run)/while/body/convert", names, 4 * 1024 * 1024, "body/true_branch"),
    ]


def test_weights_that_a_loop_changes_are_data():
    changed = HLO.replace("tuple(%next, %chosen, %kept)", "tuple(%next, %chosen, %updated)").replace(
        "  ROOT %result", "  %updated = bf16[1024,1024]{1,0} add(%kept, %kept)\n  ROOT %result"
    )
    assert [work.name for work in find_weight_work(changed)] == ["joined"]


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (count_launches, "no list", "no thunk"),
        (find_weight_work, "HloModule jit_run", "no ENTRY"),
        (find_weight_work, HLO.replace("arrays", "given"), "no parameter matches"),
    ],
)
def test_texts_in_another_format_are_refused(read, text, message):
    with pytest.raises(ValueError, match=message):
        read(text)
