"""What a GPU really ran, by the names of its kernels: :func:`kind_of`, and :class:`KernelTimes` which adds up their time.

Names are the only thing that a profiler tells of a kernel's formats. Where a name says nothing, a kernel is taken for the
lesser kind: an FP8 GEMM for a GEMM, a cast for the rest. So what eager torch does around a quantization (a maximum, a
multiplication) is among the rest. Used by ``Fp8CoverageMonitor``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal

import torch
from torch._C._autograd import DeviceType, _profiler_enabled
from torch.profiler import ProfilerActivity, profile

Kind = Literal["fp8 gemm", "gemm", "attention", "cast", "rest"]

_ATTENTION = re.compile(
    r"flash_(?:fwd|bwd|fprop|bprop)"  # FlashAttention 2: pytorch_flash::flash_fwd_kernel; cuDNN: ..._flash_fprop_...
    r"|flash::FlashAttn"  # FlashAttention 3: cutlass::device_kernel<flash::...FlashAttnFwdSm90<...>>
    r"|_sdpa_"  # cuDNN: cudnn_generated_fort_native_sdpa_sm90_...
    r"|fmha_|AttentionKernel"  # torch's memory-efficient one: fmha_cutlassF_bf16_aligned_64x128_rf_sm80
    r"|compute_dot_do_o"  # cuDNN and FlashAttention, before the backward
)
_FP8_GEMM = re.compile(
    # cuBLAS 12.8 and later, on Hopper and Blackwell: nvjet_qqtst_128x256_..., nvjet_sm100_qqtst_... Five letters stand for
    # A, B, C, the accumulator and D (t BF16, h FP16, s FP32, q E4M3, o FP4), three where A and B are as C. That of E5M2 is
    # not documented, but the other operand beside it is always E4M3.
    r"nvjet_(?:sm\d+_)?(?:q[a-z]|[a-z]q)[a-z]{3}_"
    # cuBLAS before, A and C in one word: sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_... (Transformer Engine's issue 1391).
    # CUTLASS's own names, in Inductor: cutlass3x_sm90_tensorop_gemm_e4m3_e4m3_f32_...; for MX ..._gemm_ue8m0xe4m3_...
    r"|gemm_(?:ue8m0x)?(?:e4m3|e5m2)"
    # CUTLASS's mainloop for FP8 with exact accumulation, as torch has it for scales a row.
    r"|WarpSpecializedFP8"
)
# CUTLASS's templates spell the operands' types: cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<
# cutlass::gemm::kernel::GemmUniversal<..., cutlass::float_e4m3_t, ...>>>. With FP4 they are the scales' types.
_CUTLASS_FP8 = re.compile(r"cutlass::gemm.*float_(?:e4m3|e5m2)_t")
_CUTLASS_FP4 = "float_e2m1_t"
_CAST = re.compile(
    # torch, ATen's Copy.cu: float8_, bfloat16_, float16tofloat32_copy_kernel_cuda. Where it has no kernel for a pair of
    # dtypes, the general copy, which converts if it is no `gpu_kernel_impl_nocast` and loads `LoadWithCast`.
    r"float\w*_copy_kernel_cuda"
    r"|direct_copy_kernel_cuda.*LoadWithCast|gpu_kernel_impl<at::native::direct_copy_kernel_cuda"
    # Transformer Engine's common/cast, common/transpose and common/recipe: cast_transpose_optimized_kernel and the
    # transposes beside it (compiled at run time, so without a namespace), block_scaled_1d_cast_transpose_kernel,
    # quantize_mxfp8_kernel, amax_kernel, compute_scale_from_amax_kernel, unary_kernel<..., identity, ...>.
    r"|cast_transpose|transpose_(?:optimized|general)_kernel|quantize_|amax_kernel|scale_from_amax"
    r"|transformer_engine::.*unary_kernel<.*identity"
)
_GEMM = re.compile(
    # cuBLAS: nvjet_tst_..., sm80_xmma_gemm_..., ampere_bf16_s16816gemm_..., gemv2T_kernel_val, and what adds up the parts
    # of a GEMM, cublasLt::splitKreduce_kernel. CUTLASS: cutlass_80_tensorop_bf16_s16816gemm_..., GemmUniversal. cuDNN:
    # sm80_xmma_fprop_implicit_gemm_..., implicit_convolve_sgemm, cutlass_tensorop_f16_s16816fprop_optimized_...
    r"gemm|gemv|nvjet_|xmma|splitKreduce|convolve|winograd|fprop|dgrad|wgrad",
    re.IGNORECASE,
)
# Inductor names a kernel by its kind (tem a template, that is a GEMM or attention; poi, red, per) and the operators in it.
_INDUCTOR = re.compile(r"triton_(\w+?)_fused_(\w*?)_?\d*$")
# A kernel of these alone prepares operands: triton_red_fused_abs_max_0, triton_poi_fused__to_copy_clamp_mul_t_3. The
# product that it is for is often among them: triton_poi_fused__scaled_mm__to_copy_clamp_mul_reciprocal_t_view_4.
_OF_CASTS = {
    "to", "copy", "abs", "max", "amax", "maximum", "minimum", "clamp", "min", "mul", "div", "reciprocal", "scaled", "mm",
    "addmm", "bmm", "t", "transpose", "permute", "view", "clone", "unsqueeze", "squeeze", "expand", "slice",
}  # fmt: skip


@cache
def kind_of(kernel_name: str) -> Kind:
    """What a kernel does.

    Args:
        kernel_name: Its name as a profiler shows it, unshortened.

    Returns:
        ``fp8 gemm``, ``gemm`` (convolutions too), ``attention``, ``cast`` (quantization too) or ``rest``.
    """
    if (inductor := _INDUCTOR.match(kernel_name)) is not None:
        return _of_inductor(inductor[1], inductor[2])
    if _ATTENTION.search(kernel_name):
        return "attention"
    if _FP8_GEMM.search(kernel_name) or (_CUTLASS_FP8.search(kernel_name) and _CUTLASS_FP4 not in kernel_name):
        return "fp8 gemm"
    if _CAST.search(kernel_name):
        return "cast"
    return "gemm" if _GEMM.search(kernel_name) else "rest"


def _of_inductor(heuristic: str, operators: str) -> Kind:
    if heuristic == "tem":
        if "attention" in operators:
            return "attention"
        return "fp8 gemm" if re.search("scaled_(?:grouped_)?mm", operators) else "gemm"
    words = set(operators.split("_")) - {""}
    casts = {"to", "copy"} <= words or ("abs" in words and words & {"max", "amax"})
    return "cast" if casts and words <= _OF_CASTS else "rest"


class KernelTimes:
    """Adds up what a CUDA device does in micro-batches, by torch's profiler. On any other device it does nothing.

    The first start of a profiler in a process takes seconds, each one waits for the device, and every kernel costs host
    time. No number changes.

    Args:
        device: Where the model runs.

    Attributes:
        nanoseconds: The device's time by kind of kernel.
        fp8_gemms: Number of FP8 GEMM kernels; ``None`` where nothing could be recorded.
        note: Why not, or empty.
    """

    def __init__(self, device: torch.device) -> None:
        self.nanoseconds: dict[Kind, int] = {}
        self.fp8_gemms: int | None = None
        self.note = ""
        self._device = device
        self._profiler: profile | None = None

    def begin(self) -> None:
        """Begins to record, unless another profiler does."""
        if self._device.type != "cuda" or torch.version.hip is not None:
            return
        if _profiler_enabled():
            self.note = "Another profiler was running, so kernels were not looked at: times are those of operators."
            return
        torch.cuda.synchronize(self._device)  # what was launched before is none of ours
        self._profiler = profile(activities=[ProfilerActivity.CUDA])
        self._profiler.start()

    def end(self) -> None:
        """Ends it, and adds what was recorded."""
        recorded, self._profiler = self._profiler, None
        if recorded is None:
            return
        recorded.stop()
        self.add(recorded.events() or ())  # type: ignore[no-untyped-call]

    def add(self, events: Iterable[Any]) -> None:
        """Adds the kernels among a profiler's events.

        Args:
            events: With ``name``, ``device_type``, ``is_user_annotation`` and ``time_range`` as torch's have them.
        """
        kernels = 0
        for event in events:
            if event.device_type != DeviceType.CUDA or event.is_user_annotation:
                continue
            kernels += 1
            kind = kind_of(event.name)
            spent = round(1000 * event.time_range.elapsed_us())
            self.nanoseconds[kind] = self.nanoseconds.get(kind, 0) + spent
            if kind == "fp8 gemm":
                self.fp8_gemms = (self.fp8_gemms or 0) + 1
        if kernels:
            self.fp8_gemms = self.fp8_gemms or 0
        else:  # a profiler of NVIDIA's own holds the counters
            self.note = "The profiler recorded no kernel, so times are those of operators."

    def spent(self) -> dict[str, int]:
        """The nanoseconds of ``gemm`` (attention included), ``cast`` and ``rest``; empty where nothing was recorded."""
        times = self.nanoseconds
        if not times:
            return {}
        gemm = sum(times.get(kind, 0) for kind in ("fp8 gemm", "gemm", "attention"))
        return {"gemm": gemm, "cast": times.get("cast", 0), "rest": times.get("rest", 0)}


def confirmed(claimed: int, seen: int | None) -> str:
    """What the kernels say of the claim that GEMMs ran natively in FP8.

    Args:
        claimed: How many are said to.
        seen: How many FP8 GEMM kernels ran; ``None`` if nobody looked.

    Returns:
        What to know, or nothing if it is borne out or nobody looked.
    """
    if seen is None or seen >= claimed:
        return ""
    if not seen:
        return (
            f"{claimed} GEMMs are said to have run in FP8, but no kernel that the device ran is an FP8 GEMM by its name: "
            "what Transformer Engine says does not count, what was dispatched does."
        )
    return f"{claimed} GEMMs are said to have run in FP8, and {seen} kernels are FP8 GEMMs by their names."
