// Times the matrix products of a GPT's step on a CUDA device, alone and with what they do besides.
//     product_cuda_bench [CHANNELS TOKENS VOCABULARY]
#include <torus/core/gemm.h>
#include <torus/torus.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cuda_bench.h"

namespace {

using namespace torus;

/// The least mean of a few rounds, in microseconds.
template <class F>
double time_of(F&& f) {
  for (int i = 0; i < 3; ++i) f();
  return bench::least_time(5, 20, f);
}

/// Random numbers, which cost more power than zeros do; some of them repeated.
Tensor matrix(int64_t rows, int64_t columns) {
  const Tensor some = randn({std::min<int64_t>(rows, 256), columns}, 0, 1, bf16).to(cuda);
  Tensor all = Tensor::empty({rows, columns}, bf16, cuda);
  for (int64_t first = 0; first < rows; first += 256) {
    const int64_t count = std::min<int64_t>(256, rows - first);
    all.slice(0, first, first + count).copy_(some.slice(0, 0, count));
  }
  return all;
}

/// A product c [m, n] = a [m, k] b [k, n] and what it does besides.
template <class F>
void show(const std::string& name, int64_t m, int64_t n, int64_t k, F&& f) {
  Tensor c = Tensor::empty({m, n}, bf16, cuda);
  const double time = time_of([&] { f(c); });
  const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  std::printf("%-28s [%ld, %ld] x [%ld, %ld] %9.1f us %6.0f TFLOP/s\n", name.c_str(), long(m), long(k),
              long(k), long(n), time, flops / time / 1e6);
}

/// y = x w^T and its two gradients.
void show_linear(const std::string& name, int64_t rows, int64_t in, int64_t out) {
  const Tensor x = matrix(rows, in), w = matrix(out, in), dy = matrix(rows, out),
               bias = matrix(1, out).select(0, 0);
  show(name, rows, out, in, [&](Tensor& c) { product(c, x, w.transpose(0, 1), {.bias = bias}); });
  show(name + " dx", rows, in, out, [&](Tensor& c) { product(c, dy, w); });
  show(name + " dw", out, in, rows, [&](Tensor& c) { product(c, dy.transpose(0, 1), x); });
  std::printf("%-28s %9.1f us\n", (name + " db").c_str(), time_of([&] { sum_to(dy, {out}); }));
}

}  // namespace

int main(int argc, char** argv) {
  if (!cuda_available()) {
    std::printf("no CUDA device\n");
    return 0;
  }
  const int64_t c = argc > 3 ? std::atol(argv[1]) : 768, rows = argc > 3 ? std::atol(argv[2]) : 32768,
                vocabulary = argc > 3 ? std::atol(argv[3]) : 50304;
  show_linear("qkv", rows, c, 3 * c);
  show_linear("out", rows, c, c);
  show_linear("up", rows, c, 4 * c);
  show_linear("down", rows, 4 * c, c);
  show_linear("head", rows, c, vocabulary);
  const Tensor x = matrix(rows, c), up = matrix(4 * c, c), bias = matrix(1, 4 * c).select(0, 0);
  Tensor hidden = matrix(rows, 4 * c), input = hidden.clone();
  bool done = true;
  const double fused = time_of([&] { done &= product_gelu(hidden, input, x, up.transpose(0, 1), bias); });
  std::printf("up with GELU %.1f us%s\n", fused, done ? "" : " (not possible)");
}
