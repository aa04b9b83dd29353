// Times the kernels of attention on a CUDA device, each backend that can run a problem, by events of the
// device.
//     attention_cuda_bench [REGEX of names]
// TFLOP/s are useful ones: 4 (forward) or 10 (backward) times the allowed pairs times the width; "visited"
// are those of all pairs in the tiles that the mask's map visits. Backward gives the same bits each time,
// unordered need not. MiB: results and what a pass holds beside them, at most.
#include <cuda_runtime.h>
#include <torus/ops/attention/backend.h>
#include <torus/torus.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <regex>
#include <string>

namespace torus::gpu {
cudaStream_t stream_of(Device device);  // core/cuda.h is for nvcc alone
}

namespace {

using namespace torus;

struct Case {
  std::string name;
  int64_t batch, heads, queries, keys, width;
  Mask mask = full();
  DType dtype = bf16;
};

// Sixteen thousand tokens, 2048 channels.
Case dense(int64_t tokens, int64_t width, const std::string& name = "full", const Mask& mask = full()) {
  return {name + " d" + std::to_string(width) + " N" + std::to_string(tokens),
          16384 / tokens,
          2048 / width,
          tokens,
          tokens,
          width,
          mask};
}

Case wrapped(int64_t side, int64_t window, int64_t batch, int64_t width) {
  const std::string sides = std::to_string(side);
  return {"wrap " + sides + "^3 w" + std::to_string(window) + " B" + std::to_string(batch) + " d" +
              std::to_string(width),
          batch,
          8,
          side * side * side,
          side * side * side,
          width,
          neighborhood({.grid = {side, side, side}, .window = {window}, .boundary = {wrap}})};
}

// Pairs of blocks at random, a quarter of them, and those of the diagonal. Blocks are of 96 tokens: many
// tiles are cut.
Mask random_blocks() {
  return Mask::from([](Query q, Key k) {
    const int64_t a = q.token / 96, b = k.token / 96;
    return a == b || (a * 7919 + b * 104729) % 1013 % 4 == 0;
  });
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (int64_t width : {64, 128})
    for (int64_t tokens : {512, 2048, 8192, 16384}) all.push_back(dense(tokens, width));
  for (int64_t width : {64, 128})
    for (int64_t tokens : {512, 2048, 8192, 16384}) all.push_back(dense(tokens, width, "causal", causal()));
  all.push_back({"causal char d64 N256", 64, 6, 256, 256, 64, causal()});
  all.push_back(dense(8192, 256));
  all.push_back(dense(8192, 256, "causal", causal()));
  all.push_back(dense(8192, 128, "window 1024", sliding_window(512, 511)));
  all.push_back(dense(16384, 128, "window 256", sliding_window(128, 127)));
  const Mask documents = causal() & document({1900, 700, 2500, 300, 1100, 1692});
  for (int64_t width : {64, 128}) {
    all.push_back(dense(8192, width, "lambda", random_blocks()));
    all.push_back(dense(8192, width, "causal & document", documents));
  }
  all.push_back(wrapped(16, 5, 4, 64));
  all.push_back(wrapped(20, 5, 4, 64));
  all.push_back(wrapped(20, 5, 4, 128));
  all.push_back(wrapped(32, 5, 1, 64));
  all.push_back(wrapped(32, 9, 1, 64));
  for (auto [queries, keys, width] : {std::array<int64_t, 3>{4096, 4096, 40},
                                      {4096, 77, 40},
                                      {1024, 1024, 80},
                                      {256, 256, 160},
                                      {4096, 4096, 64},
                                      {4096, 77, 64}})
    all.push_back(
        {"f16 " + std::to_string(queries) + "x" + std::to_string(keys) + " d" + std::to_string(width), 4, 8,
         queries, keys, width, full(), f16});
  return all;
}

/// The least mean of a few rounds, in milliseconds.
template <class F>
double time(cudaStream_t stream, F&& f) {
  cudaEvent_t start, stop;
  cudaEventCreate(&start);
  cudaEventCreate(&stop);
  const auto round = [&](int count) {
    cudaEventRecord(start, stream);
    for (int i = 0; i < count; ++i) f();
    cudaEventRecord(stop, stream);
    cudaEventSynchronize(stop);
    float ms = 0;
    cudaEventElapsedTime(&ms, start, stop);
    return static_cast<double>(ms) / count;
  };
  round(2);
  const int count = std::clamp(static_cast<int>(20 / std::max(round(1), 1e-3)), 3, 200);
  double best = round(count);
  for (int i = 0; i < 2; ++i) best = std::min(best, round(count));
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  return best;
}

void measure(const Case& c) {
  const auto make = [&](int64_t tokens) {
    return detail::empty_heads(c.batch, c.heads, tokens, c.width, c.dtype, cuda);
  };
  // Random numbers, which cost more power than zeros do, the same for all heads.
  const auto make_random = [&](int64_t tokens) {
    Tensor x = make(tokens);
    x.copy_(randn({1, 1, tokens, c.width}).to(c.dtype).to(cuda).expand(x.shape()));
    return x;
  };
  detail::AttentionProblem p;
  p.q = make_random(c.queries), p.k = make_random(c.keys), p.v = make_random(c.keys);
  const Tensor d_out = make_random(c.queries);
  p.mask = c.mask;
  p.scale = 1 / std::sqrt(static_cast<double>(c.width));
  const MaskCosts costs = mask_costs(c.mask, c.queries, c.keys);
  // Milliseconds, useful TFLOP/s, visited.
  const auto print = [&](double ms, double products) {
    const double all = 1e-9 * products * static_cast<double>(c.batch * c.heads * c.width) / ms;
    std::printf(" %9.3f %8.1f %8.1f", ms, all * static_cast<double>(costs.needed),
                all * static_cast<double>(costs.visited));
    std::fflush(stdout);
  };
  for (const auto& backend : detail::attention_backends()) {
    if (!backend.refusal(p).empty() || backend.id == Backend::cuda_simt) continue;
    detail::AttentionGradients g;
    g.out = make(c.queries), g.d_out = d_out;
    g.lse = Tensor::empty({c.batch, c.heads, c.queries}, f32, cuda);
    g.dq = make(c.queries), g.dk = make(c.keys), g.dv = make(c.keys);
    const cudaStream_t stream = gpu::stream_of(cuda);
    std::printf("%-28s %-9s", c.name.c_str(), name(backend.id));
    print(time(stream, [&] { backend.forward(p, g.out, g.lse); }), 4);
    const Tensor* const made[] = {&g.out, &g.lse, &g.dq, &g.dk, &g.dv};
    int64_t results = 0;
    for (const Tensor* x : made) results += static_cast<int64_t>(x->storage()->bytes());
    const int64_t before = memory_stats(cuda).live_bytes;
    reset_peak_memory(cuda);
    for (const bool deterministic : {true, false}) {
      p.deterministic = deterministic;
      print(time(stream, [&] { backend.backward(p, g); }), 10);
    }
    std::printf(" %8.1f\n",
                static_cast<double>(memory_stats(cuda).peak_bytes - before + results) / (1 << 20));
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (!cuda_available()) {
    std::puts("no CUDA device");
    return 0;
  }
  std::printf("%-28s %-9s", "", "");
  for (const char* pass : {"forward", "backward", "unordered"})
    std::printf(" %9s %8s %8s", pass, "TFLOP/s", "visited");
  std::printf(" %8s\n", "MiB");
  const std::regex chosen(argc < 2 ? "" : argv[1]);
  for (const Case& c : cases())
    if (std::regex_search(c.name, chosen)) measure(c);
}
