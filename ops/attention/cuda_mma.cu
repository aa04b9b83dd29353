// The backend `cuda_mma`: what it can run, and what its kernels are told of a problem.
#include <algorithm>

#include "torus/ops/attention/cuda_mma.h"

namespace torus {

namespace gpu::mma {

namespace {
const void* elements(const Tensor& x) {
  return x.dtype() == f16 ? static_cast<const void*>(read<__half>(x)) : read<__nv_bfloat16>(x);
}
}  // namespace

Operand operand(const Tensor& x) {
  return {const_cast<void*>(elements(x)), x.strides()[0], x.strides()[1], x.strides()[2]};
}

bool packs(const Tensor& x) {
  bool whole = is_aligned(operand(x).data) && x.size(3) % 8 == 0;
  for (int axis = 0; axis < 3; ++axis) whole = whole && (x.size(axis) == 1 || x.strides()[axis] % 8 == 0);
  return whole && std::abs(x.strides()[2]) < int64_t{1} << 30;
}

int padded_width(const AttentionProblem& p) {
  const int64_t width = std::max(p.width(), p.value_width());
  return width <= 64 ? 64 : width <= 128 ? 128 : 256;
}

bool general_scores(const AttentionProblem& p) {
  return !(p.scale > 1e-30) || p.softcap > 0 || !p.bias.empty() || p.dropout.active();
}

HostScores::HostScores(const AttentionProblem& p, const std::vector<Tensor>& d_bias) : arguments{} {
  arguments.scale = static_cast<float>(p.scale);
  arguments.softcap = static_cast<float>(p.softcap);
  arguments.shift = p.keys() - p.queries();
  arguments.dropout = p.dropout;
  arguments.keep_scale = p.dropout.active() ? static_cast<float>(p.dropout.keep_scale()) : 1;
  arguments.threshold = p.dropout.threshold();
  if (p.dropout.active()) arguments.position = replayed_position(p.dropout.position);
  for (const AttentionBias& bias : p.bias) {
    BiasTerm& term = arguments.term[arguments.terms];
    term.kind = bias.kind();
    Tensor value = bias.value().value();
    if (bias.kind() == AttentionBias::Kind::dense) {
      for (int axis = 0; axis < 4; ++axis)
        term.step[axis] = value.size(axis) == 1 ? 0 : value.strides()[axis];
    } else {
      value = (bias.kind() == AttentionBias::Kind::alibi ? value.to(f32) : value).contiguous();
      term.step[1] = value.size(0) == 1 ? 0 : value.numel() / value.size(0);
      term.axes = static_cast<int>(bias.grid().size());
      for (int axis = 0; axis < term.axes; ++axis) {
        term.length[axis] = static_cast<int32_t>(bias.grid()[static_cast<size_t>(axis)]);
        term.size[axis] = static_cast<int32_t>(value.size(axis + 1));
        term.wrapped[axis] = bias.wrapped()[static_cast<size_t>(axis)];
      }
    }
    term.data = value.dtype() == f32 ? value.data<float>() : elements(value);
    const auto i = static_cast<size_t>(arguments.terms++);
    if (i < d_bias.size() && d_bias[i].defined()) {
      Tensor gradient = d_bias[i];
      term.gradient =
          p.q.dtype() == f16 ? static_cast<void*>(write<__half>(gradient)) : write<__nv_bfloat16>(gradient);
      for (int axis = 0; axis < 4; ++axis) term.gradient_step[axis] = gradient.strides()[axis];
    }
    kept.push_back(std::move(value));
  }
}

BiasGradients::BiasGradients(const AttentionProblem& p, const torus::detail::AttentionGradients& g)
    : of_scores(g.d_bias.size()), sums_(g) {
  for (size_t i = 0; i < g.d_bias.size(); ++i) {
    if (!g.d_bias[i].defined()) continue;
    const bool of_all = p.bias[i].kind() == AttentionBias::Kind::dense &&
                        g.d_bias[i].shape() == Shape{p.batch(), p.heads(), p.queries(), p.keys()};
    if (of_all) {
      any_of_scores = true;
      of_scores[i] = g.d_bias[i];
      of_scores[i].fill_(0);
      sums_.d_bias[i] = Tensor();
    } else {
      any_sums_ = true;
    }
  }
}

void BiasGradients::finish(const AttentionProblem& p) const {
  torus::detail::AttentionGradients sums = sums_;
  if (any_sums_) bias_gradients(p, sums);
}

namespace {

std::string refusal(const AttentionProblem& p) {
  if (p.q.device().kind != DeviceKind::cuda) return "the tensors are not in device memory";
  if (p.q.dtype() != f16 && p.q.dtype() != bf16) return "it takes f16 and bf16 alone";
  if (std::max(p.width(), p.value_width()) > 256) return "it takes widths of at most 256";
  const cudaDeviceProp& device = properties(p.q.device());
  if (device.major < 8) return "the device is older than sm_80";
  if (shared_memory(padded_width(p)) + static_memory > device.sharedMemPerBlockOptin)
    return "the device has too little shared memory for this width";
  if (p.bias.size() > max_terms) return "it takes at most 4 biases";
  return "";
}

[[maybe_unused]] const torus::detail::RegisteredBackend registered{
    {Backend::cuda_mma, refusal, run_forward, run_backward}};

}  // namespace

}  // namespace gpu::mma

}  // namespace torus
