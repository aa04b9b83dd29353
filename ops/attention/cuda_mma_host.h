// What the host side of both passes of cuda_mma shares. For kernels; not installed.
#pragma once

#include "torus/ops/attention/cuda_mma.h"

namespace torus::gpu::mma {

void run_forward(const AttentionProblem& problem, Tensor& out, Tensor& lse);
void run_backward(const AttentionProblem& problem, torus::detail::AttentionGradients& gradients);

/// A tensor for kernels. Its last stride is 1.
Operand operand(const Tensor& x);
/// Whether every row starts at a multiple of 16 bytes.
bool packs(const Tensor& x);
/// The width that kernels are made for: 64, 128 or 256.
int padded_width(const AttentionProblem& problem);
/// Shared memory that the widest of the kernels needs.
size_t shared_memory(int padded_width);

/// Arguments of scores, and what they point to. `d_bias`: gradients of terms, undefined where not wanted.
struct HostScores {
  HostScores(const AttentionProblem& problem, const std::vector<Tensor>& d_bias);
  ScoreArguments arguments;
  bool general;                // more than a positive scale
  std::vector<Tensor> kept{};  // what pointers lead to
};

template <class F>
void dispatch_16_bit(DType dtype, F&& f) {
  if (dtype == f16)
    f(__half{});
  else
    f(__nv_bfloat16{});
}
template <class F>
void dispatch_width(int padded_width, F&& f) {
  if (padded_width == 64)
    f(std::integral_constant<int, 64>{});
  else if (padded_width == 128)
    f(std::integral_constant<int, 128>{});
  else
    f(std::integral_constant<int, 256>{});
}

}  // namespace torus::gpu::mma
