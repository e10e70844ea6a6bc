"""Names of CUDA kernels as profilers have shown them, and what is made of a profiler's events. No GPU is needed.

Long names are shortened where nothing hangs on it. Those with E5M2 and of CUTLASS's templates are put together by the
pattern of the others.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lightning_amp_plus.fp8.coverage.kernels import KernelTimes, Kind, confirmed, kind_of

_ROWWISE = (
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<"
    "cute::tuple<int, int, int>, cutlass::gemm::collective::CollectiveMma<cutlass::gemm::{mainloop}<5, cute::tuple<"
    "cute::C<2>, cute::C<1>, cute::C<1>>, cutlass::gemm::KernelTmaWarpSpecializedPingpong>, cute::tuple<cute::C<64>, "
    "cute::C<128>, cute::C<128>>, {operand}, cute::tuple<long, cute::C<1>, long>>, void>>>(Params)"
)
_COPY = (
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda(float)#1}"
)

NAMES: dict[Kind, list[str]] = {
    "fp8 gemm": [
        "nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT",
        "nvjet_qqtst_112x128_128x7_2x1_v_bz_coopA_algo2_TNN",
        "nvjet_qqtst_128x256_128x6_2x2_2cta_h_bz_Avec32UE8M0_Bvec32UE8M0_TNT",
        "nvjet_sm100_qqtst_128x256_128x6_2x1_2cta_v_bz_bias_TNT",
        "nvjet_sm100_qqsss_128x128_128x8_2x4_2cta_h_bz_Avec32UE8M0_Bvec32UE8M0_TNT",
        "nvjet_sm120_qqtst_mma_64x64x128_3_32x32x128_tmaAB_bz_TNNN",
        "nvjet_qqhsh_128x128_128x5_1x2_h_bz_TNN",
        "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x64_stage4_warpsize2x2x1_tensor16x8x32_execute_kernel__5x_cublas",
        "sm89_xmma_gemm_e5m2bf16_e4m3f32_f32_tn_n_tilesize64x64x64_stage4_warpsize2x2x1_tensor16x8x32_execute_kernel__5x_cublas",
        "cutlass3x_sm90_tensorop_gemm_e4m3_e4m3_f32_f32_f32_64x256x128_2x1x1_0_tnn_align16_warpspecialized_pingpong_fp8_fastaccum_epi_tma",
        "cutlass3x_sm100_tensorop_gemm_e4m3_e4m3_f32_bf16_bf16_64x128x128_0x0x1_0_tnn_align16_1sm",
        "cutlass3x_sm100_bstensorop_gemm_ue8m0xe4m3_ue8m0xe4m3_f32_void_bf16_128x128x128_0x0x1_0_tnt_align16_1sm",
        _ROWWISE.format(mainloop="MainloopSm90TmaGmmaWarpSpecializedFP8", operand="cutlass::float_e4m3_t"),
        _ROWWISE.format(mainloop="MainloopSm90TmaGmmaWarpSpecialized", operand="cutlass::float_e4m3_t"),
        "triton_tem_fused__scaled_mm_0",
    ],
    "gemm": [
        "nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NNN",
        "nvjet_tss_256x128_64x4_1x2_h_bz_coopA_TNT",
        "nvjet_sm90_hsh_32x64_64x16_4x1_v_bz_TNN",
        "nvjet_sm120_tst_mma_64x64x128_3_32x32x128_tmaAB_alignCD4_bz_TNNN",
        "nvjet_ootst_128x192_256x5_2x1_2cta_v_bz_Avec16UE4M3_Bvec16UE4M3_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_nn",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, false>(Params)",
        _ROWWISE.format(mainloop="MainloopSm90TmaGmmaWarpSpecialized", operand="cutlass::bfloat16_t"),
        _ROWWISE.format(mainloop="X", operand="cutlass::nv_float4_t<cutlass::float_e2m1_t>, cutlass::float_e4m3_t"),
        "triton_tem_fused__to_copy_addmm_gelu_t_view_9",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 64, 4, cutlass::bfloat16_t>>(Params)",
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<X, cutlass::gemm::Y, cutlass::float_e4m3_t>>(Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(Params)",
        "fmha_cutlassB_bf16_aligned_128x128_k128_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<cutlass::bfloat16_t>)",
        "triton_tem_fused_flex_attention_backward_split_transpose_3",
    ],
    "cast": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::float8_copy_kernel_cuda(at::TensorIteratorBase&)::"
        "{lambda(c10::BFloat16)#1}, std::array<char*, 2ul>>(int)",
        "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::"
        "{lambda(float)#1}, std::array<char*, 2ul>>(int)",
        f"void at::native::unrolled_elementwise_kernel<{_COPY}, std::array<char*, 2ul>, 4, "
        "at::native::memory::LoadWithCast<1>, at::native::memory::StoreWithCast<1>>(int)",
        f"void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<{_COPY}>(at::TensorIteratorBase&)>(int)",
        "cast_transpose_optimized_kernel(__nv_bfloat16 const*, float const*, __nv_fp8_e4m3*, __nv_fp8_e4m3*, float const*)",
        "void transformer_engine::amax_kernel<16, true, __nv_bfloat16>(__nv_bfloat16 const*, float*, unsigned long)",
        "transformer_engine::compute_scale_from_amax_kernel(float const*, float*, float, bool, float)",
        "void transformer_engine::unary_kernel<16, true, float, transformer_engine::detail::Empty, "
        "&transformer_engine::detail::identity, __nv_bfloat16, __nv_fp8_e4m3>(Params)",
        "triton_red_fused_abs_max_0",
        "triton_per_fused__to_copy_abs_clamp_max_mul_reciprocal_view_1",
        "triton_poi_fused__scaled_mm__to_copy_clamp_mul_reciprocal_t_view_4",
        "triton_poi_fused__to_copy_1",
    ],
    "rest": [
        f"void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<{_COPY}>(X)>(int)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3>>(int)",
        "void at::native::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>>(Params)",
        "void transformer_engine::normalization::rmsnorm_fwd_general_kernel<X>(Params)",
        "triton_poi_fused__to_copy_addmm_gelu_2",
        "triton_red_fused_native_layer_norm_1",
        "triton_poi_fused_0",
        "Memcpy DtoD (Device -> Device)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for kind, names in NAMES.items() for name in names])
def test_kind_of_a_kernel(name: str, kind: Kind) -> None:
    assert kind_of(name) == kind


def event(name: str, microseconds: float, device: Any = DeviceType.CUDA, annotation: bool = False) -> Any:
    time_range = SimpleNamespace(elapsed_us=lambda: microseconds)
    return SimpleNamespace(name=name, device_type=device, is_user_annotation=annotation, time_range=time_range)


def test_times_of_several_micro_batches_add_up() -> None:
    times = KernelTimes(torch.device("cuda"))
    fp8, copy = NAMES["fp8 gemm"][0], NAMES["cast"][0]
    times.add([event(fp8, 2.5), event(fp8, 1), event(copy, 3), event("cudaLaunchKernel", 9, DeviceType.CPU)])
    times.add([event("my annotation", 50, annotation=True), event(NAMES["gemm"][0], 4), event(NAMES["rest"][0], 5)])
    times.add([event(NAMES["attention"][0], 6)])
    assert times.nanoseconds == {"fp8 gemm": 3500, "cast": 3000, "gemm": 4000, "rest": 5000, "attention": 6000}
    assert times.spent() == {"gemm": 13500, "cast": 3000, "rest": 5000}
    assert times.fp8_gemms == 2 and not times.note


def test_kernels_without_a_gemm_in_fp8_are_none_and_no_kernels_are_unknown() -> None:
    some, none = KernelTimes(torch.device("cuda")), KernelTimes(torch.device("cuda"))
    some.add([event(NAMES["gemm"][0], 1)])
    none.add([event("cudaLaunchKernel", 9, DeviceType.CPU)])
    assert some.fp8_gemms == 0 and not some.note
    assert none.fp8_gemms is None and "no kernel" in none.note and none.spent() == {}


def test_it_steps_aside_for_another_profiler_and_says_so() -> None:
    times = KernelTimes(torch.device("cuda"))
    with profile(activities=[ProfilerActivity.CPU]) as users:
        times.begin()
        torch.ones(3).exp()
        times.end()
    assert "Another profiler" in times.note and times.fp8_gemms is None and times.spent() == {}
    assert any(found.name == "aten::exp" for found in users.events() or ())


def test_on_a_cpu_it_does_nothing() -> None:
    times = KernelTimes(torch.device("cpu"))
    times.begin()
    assert not torch.autograd._profiler_enabled()
    times.end()
    assert times.fp8_gemms is None and not times.note and times.spent() == {}


@pytest.mark.parametrize(("claimed", "seen"), [(0, 0), (6, None), (6, 6), (6, 7)])
def test_nothing_to_say_of_a_claim(claimed: int, seen: int | None) -> None:
    assert confirmed(claimed, seen) == ""


def test_a_claim_that_no_kernel_bears_out_is_not_believed() -> None:
    assert "6 GEMMs" in confirmed(6, 0) and "Transformer Engine says does not count" in confirmed(6, 0)
    assert "4 kernels" in confirmed(6, 4) and "does not count" not in confirmed(6, 4)
