#include "engine/device/activity.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

void expect_kind(std::string_view name, Activity activity, const std::string& op) {
  const ActivityKind kind = classify_kernel(name);
  EXPECT_EQ(kind.activity, activity) << name << ": " << name_of(kind.activity);
  EXPECT_EQ(kind.op, op) << name;
}

TEST(ClassifyKernel, LibraryProducts) {
  for (const char* name :
       {"nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "nvjet_qqtst_128x256_128x4_2x1_v_bz_coopA_TNN",
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopB_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x128x64_warpgroupsize1x1x1_execute_"
        "segment_k_off_kernel__5x_cublas",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "_ZN7cutlass7Kernel2I57cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nt_"
        "align8EEvNT_"
        "6ParamsE",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nn_align1>(Params)",
        "_ZN8cublasLt19gemv2T_kernel_valueEv"}) {
    expect_kind(name, Activity::kGemm, "gemm");
  }
  expect_kind("_ZN8cublasLt19splitKreduce_kernelILi32ELi16EifffLb1ELb0ELb0EEEvNS_18cublasSplit",
              Activity::kGemm, "split sums");
}

TEST(ClassifyKernel, LibraryAttention) {
  expect_kind(
      "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128_4x1x1_"
      "kernel0_0",
      Activity::kAttention, "attention forward");
  expect_kind(
      "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_6_128x64x128_1x1x1_"
      "cga1x1x1_kernel0_0",
      Activity::kAttention, "attention backward");
  expect_kind("_ZN5cudnn6fusion16compute_dot_do_oILb1E13__nv_bfloat16fLi128EEEvPKT0_S5_PT1_",
              Activity::kAttention, "attention backward");
  expect_kind("void cudnn::fusion::convert_dq_to_16bits<true, __nv_bfloat16, float, 128>(float*)",
              Activity::kAttention, "attention backward");
}

TEST(ClassifyKernel, Communication) {
  expect_kind("_Z35ncclDevKernel_AllReduce_Sum_bf16_RING24ncclDevKernelArgsStorageILm4096EE",
              Activity::kCommunication, "all_reduce");
  expect_kind("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
              Activity::kCommunication, "all_gather");
  expect_kind("ncclDevKernel_ReduceScatter_Sum_f32_RING_SIMPLE", Activity::kCommunication,
              "reduce_scatter");
  expect_kind("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", Activity::kCommunication,
              "send/recv");
  expect_kind("ncclSymkDevKernel_AllGather_ST", Activity::kCommunication, "all_gather");
  expect_kind("copy peer", Activity::kCommunication, "peer copy");
  expect_kind(
      "_ZN7tessera4cuda48_GLOBAL__N__7c0d2f11_15_reduce_parts_cu_5f2a77c119reduce_parts_"
      "kernelIfEEvNS1_5PartsEPT_l",
      Activity::kCommunication, "reduce");
}

// Names as nvcc mangles them: the file of an anonymous namespace stands in front of the function.
TEST(ClassifyKernel, OwnKernelsMangled) {
  expect_kind(
      "_ZN7tessera4cuda44_GLOBAL__N__45717ca7_11_quantize_cu_7284337411cast_kernelI13__nv_"
      "bfloat16L25__nv_fp8_interpretation_t0ELb0EEEvNS1_12CastPointersE",
      Activity::kMemoryBound, "quantize");
  expect_kind(
      "_ZN7tessera4cuda58_GLOBAL__N__06cadd51_25_attention_mma_backward_cu_d833b3f112delta_"
      "kernelENS1_9ArgumentsE",
      Activity::kAttention, "attention backward");
  expect_kind(
      "_ZN7tessera4cuda51_GLOBAL__N__bca688ff_18_attention_plain_cu_ab51a65413decode_"
      "kernelIdEEvNS1_9ArgumentsE",
      Activity::kAttention, "attention forward");
}

TEST(ClassifyKernel, OwnKernelsDemangled) {
  const std::string scope = "void tessera::cuda::(anonymous namespace)::";
  expect_kind(scope + "rmsnorm_forward_kernel<__nv_bfloat16, 8, true>(Arguments)",
              Activity::kMemoryBound, "rmsnorm_forward");
  expect_kind(scope + "rope_backward_any_kernel<float>(QkvRopeBackward)", Activity::kMemoryBound,
              "rope_backward");
  expect_kind(scope + "quantize_blocks_kernel<__nv_bfloat16, true>(CastPointers)",
              Activity::kMemoryBound, "quantize_blocks");
  expect_kind(scope + "adamw_kernel<__nv_bfloat16, float>(Pointers)", Activity::kOptimizer,
              "adamw");
  expect_kind(
      "tessera::cuda::(anonymous namespace)::square_parts_kernel(void const*, tessera::DType)",
      Activity::kOptimizer, "gradient norm");
  expect_kind(scope + "forward_kernel<__nv_bfloat16, 128>(Arguments)", Activity::kAttention,
              "attention forward");
  expect_kind(scope + "backward_key_mma_kernel<128>(Arguments)", Activity::kAttention,
              "attention backward");
}

TEST(ClassifyKernel, MemoryOperationsAndStrangers) {
  expect_kind("copy host", Activity::kCopy, "copy");
  expect_kind("copy device", Activity::kMemoryBound, "copy device");
  expect_kind("set", Activity::kMemoryBound, "set");
  expect_kind("void other::library::fill<float>(float*, int)", Activity::kMemoryBound, "fill");
}

ActivitySpan span(Activity activity, const char* op, std::uint64_t begin, std::uint64_t end) {
  return {{activity, op}, begin, end};
}

double seconds(const ActivityBreakdown& breakdown, Activity activity) {
  return breakdown.seconds[static_cast<int>(activity)];
}

TEST(BreakDown, CommunicationCountsWhereNothingComputes) {
  const ActivityBreakdown result = break_down(
      {span(Activity::kCommunication, "all_gather", 100, 400),
       span(Activity::kGemm, "gemm", 0, 200), span(Activity::kMemoryBound, "add", 150, 250)},
      0, 500);
  EXPECT_DOUBLE_EQ(result.span_seconds, 500e-9);
  EXPECT_DOUBLE_EQ(seconds(result, Activity::kGemm), 200e-9);
  EXPECT_DOUBLE_EQ(seconds(result, Activity::kMemoryBound), 50e-9);
  EXPECT_DOUBLE_EQ(seconds(result, Activity::kCommunication), 150e-9);
  EXPECT_DOUBLE_EQ(result.total_seconds[static_cast<int>(Activity::kCommunication)], 300e-9);
  EXPECT_DOUBLE_EQ(result.idle_seconds, 100e-9);
}

TEST(BreakDown, CutsSpansAtTheEndsAndAddsUpToTheStretch) {
  const std::vector<ActivitySpan> spans = {span(Activity::kGemm, "gemm", 0, 150),
                                           span(Activity::kGemm, "gemm", 120, 180),
                                           span(Activity::kAttention, "forward", 170, 300),
                                           span(Activity::kOptimizer, "adamw", 290, 320),
                                           span(Activity::kCopy, "copy", 310, 900),
                                           span(Activity::kMemoryBound, "add", 40, 60)};
  const ActivityBreakdown result = break_down(spans, 100, 400);
  double sum = result.idle_seconds;
  for (const double s : result.seconds) sum += s;
  EXPECT_NEAR(sum, result.span_seconds, 1e-15);
  EXPECT_NEAR(seconds(result, Activity::kGemm), 80e-9, 1e-15);
  EXPECT_NEAR(seconds(result, Activity::kAttention), 120e-9, 1e-15);
  EXPECT_NEAR(seconds(result, Activity::kOptimizer), 20e-9, 1e-15);
  EXPECT_NEAR(seconds(result, Activity::kCopy), 80e-9, 1e-15);
  EXPECT_EQ(seconds(result, Activity::kMemoryBound), 0);
  ASSERT_EQ(result.ops.size(), 4u);
  EXPECT_EQ(result.ops[0].count, 2);
  EXPECT_NEAR(result.ops[0].total_seconds, 110e-9, 1e-15);
  double by_op = 0;
  for (const OpTime& op : result.ops) by_op += op.seconds;
  EXPECT_NEAR(by_op + result.idle_seconds, result.span_seconds, 1e-15);
}

TEST(BreakDown, OfNothingIsIdle) {
  const ActivityBreakdown result = break_down({}, 10, 30);
  EXPECT_DOUBLE_EQ(result.idle_seconds, 20e-9);
  EXPECT_TRUE(result.ops.empty());
}

}  // namespace
}  // namespace tessera
