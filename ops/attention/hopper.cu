// The backend `hopper`: what it can run, and tensor maps.
#include <algorithm>

#include "torus/ops/attention/hopper.h"

namespace torus::gpu::hopper {

using torus::detail::AttentionProblem;

namespace {

// ------------------------------------------------------------------------------------------- tensor maps

// The driver's function, without linking to the driver: a machine may have none.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &result);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? function : nullptr;
  }();
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

}  // namespace

CUtensorMap tensor_map(const Tensor& x, int rows) {
  const mma::Operand from = mma::operand(x);
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(x.size(3)), static_cast<cuuint64_t>(x.size(2)),
                               static_cast<cuuint64_t>(x.size(1)), static_cast<cuuint64_t>(x.size(0))};
  // Strides in bytes; that of an axis of one element is never used but must be valid.
  const auto stride = [&](int axis) {
    return static_cast<cuuint64_t>(x.size(axis) == 1 ? 16 : x.strides()[axis] * 2);
  };
  const cuuint64_t strides[3] = {stride(2), stride(1), stride(0)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = encoder()(
      &map, x.dtype() == f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
      from.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, Error::Kind::Device, "[attention] the driver made no tensor map of ",
        x.shape(), ", error ", static_cast<int>(result));
  return map;
}

unsigned blocks_at_once(const mma::Schedule& schedule, Device device) {
  return std::min(schedule.blocks(), static_cast<unsigned>(properties(device).multiProcessorCount));
}

// --------------------------------------------------------------------------------------------- the backend

std::string refusal(const AttentionProblem& p) {
  if (p.q.device().kind != DeviceKind::cuda) return "the tensors are not in device memory";
  if (p.q.dtype() != f16 && p.q.dtype() != bf16) return "it takes f16 and bf16 alone";
  if (std::min(p.width(), p.value_width()) == 0 || std::max(p.width(), p.value_width()) > 256)
    return "it takes widths from 1 to 256";
  const cudaDeviceProp& device = properties(p.q.device());
  if (device.major != 9) return "the device is not of sm_90";
  if (!encoder()) return "the driver knows no tensor maps";
  if (p.bias.size() > mma::max_terms) return "it takes at most 4 biases";
  if (!mma::packs(p.q) || !mma::packs(p.k) || !mma::packs(p.v))
    return "rows of q, k and v must start at multiples of 16 bytes";
  if (p.mask.rule().packed()) return "lengths of documents are known to the device alone";
  return "";
}

namespace {
[[maybe_unused]] const torus::detail::RegisteredBackend registered{
    {Backend::hopper, refusal, run_forward, run_backward}};
}  // namespace

}  // namespace torus::gpu::hopper
