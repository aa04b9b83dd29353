// Times the kernels of a GPT's step besides products and attention, in bf16, each by itself in a captured
// graph.
//     kernels_cuda_bench [char|gpt2|toy]...
// Two times each: of tensors that are in the cache where they fit, and of tensors that take turns, and are
// not.
#include <torus/core/kernel.h>
#include <torus/torus.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "cuda_bench.h"

namespace {

using namespace torus;

struct Case {
  std::string name;
  int64_t rows, channels, context, vocabulary, parameters;
};
const std::vector<Case> cases = {{"char", 16384, 384, 256, 65, 10'800'000},
                                 {"gpt2", 32768, 768, 1024, 50304, 124'500'000},
                                 {"toy", 4096, 128, 128, 65, 800'000}};

// The kernels' own names, without what the ops do around them.
const Kernel<void(Tensor&, Tensor&, const Tensor&, const Tensor&, const Tensor&, double)> norm_forward{
    "layer_norm.forward", nullptr};
const Kernel<void(Tensor&, Tensor&, Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                  bool)>
    norm_backward{"layer_norm.backward", nullptr};
const Kernel<void(Tensor&, const Tensor&)> gelu_forward{"gelu.tanh", nullptr};
const Kernel<void(Tensor&, const Tensor&, const Tensor&)> gelu_backward{"gelu.tanh_backward", nullptr};
const Kernel<void(Tensor&, Tensor&, const Tensor&, const Tensor&, bool&)> gelu_backward_and_sums{
    "gelu.tanh_backward_and_sums", nullptr};
const Kernel<void(Tensor&, Tensor&, const Tensor&, const Tensor&, int64_t, double)> loss_forward{
    "cross_entropy.forward", nullptr};
const Kernel<void(Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, double)>
    loss_backward{"cross_entropy.backward", nullptr};
const Kernel<void(Tensor&, const Tensor&, const Tensor&)> embedding_forward{"embedding.forward", nullptr};
const Kernel<void(Tensor&, const Tensor&, const Tensor&, bool)> embedding_backward{"embedding.backward",
                                                                                   nullptr};

/// Microseconds of f(i), for the i of `turns` that take turns.
template <class F>
double time_of(int turns, F&& f) {
  const int calls = (24 + turns - 1) / turns * turns, replays = 5;
  CapturedStep step(cuda, [&] {
    for (int i = 0; i < calls; ++i) f(static_cast<size_t>(i % turns));
  });
  for (int i = 0; i < 4; ++i) step();
  return bench::least_time(4, replays, step) / calls;
}

/// `bytes` that it moves a call; the tensors of `turns` are more than the cache holds.
template <class F>
void show(const char* name, double bytes, size_t turns, F&& f) {
  const double warm = time_of(1, f), cold = time_of(static_cast<int>(turns), f);
  std::printf("  %-32s %8.1f us %6.0f GB/s   cold %8.1f us %6.0f GB/s\n", name, warm, bytes / warm / 1e3,
              cold, bytes / cold / 1e3);
  std::fflush(stdout);
}

void measure(const Case& c) {
  std::printf("%s\n", c.name.c_str());
  const auto size = [&](int64_t columns) { return 2.0 * static_cast<double>(c.rows * columns); };
  const auto tensors = [&](size_t count, const Shape& shape) {
    std::vector<Tensor> all;
    const Tensor some = randn({std::min<int64_t>(shape.numel(), 1 << 20)}, 0, 1, bf16).to(cuda);
    for (size_t i = 0; i < count; ++i) {
      Tensor x = Tensor::empty({shape.numel()}, bf16, cuda);
      for (int64_t first = 0; first < x.numel(); first += some.numel()) {
        const int64_t length = std::min(some.numel(), x.numel() - first);
        x.slice(0, first, first + length).copy_(some.slice(0, 0, length));
      }
      all.push_back(x.reshape(shape));
    }
    return all;
  };
  const auto turns_of = [](double bytes) {
    return static_cast<size_t>(std::clamp(400e6 / bytes, 2.0, 24.0));
  };
  {
    const size_t turns = turns_of(size(c.channels));
    auto x = tensors(turns, {c.rows, c.channels}), g = tensors(turns, {c.rows, c.channels}),
         y = tensors(turns, {c.rows, c.channels});
    const Tensor w = tensors(1, {c.channels})[0], b = w.clone();
    Tensor dw = w.clone(), db = w.clone(), statistics = Tensor::empty({c.rows, 3}, f32, cuda);
    show("layer_norm", 2 * size(c.channels), turns,
         [&](size_t i) { norm_forward(cuda, y[i], statistics, x[i], w, b, 1e-5); });
    for (bool adds : {false, true})
      show(adds ? "layer_norm backward, adds" : "layer_norm backward", (adds ? 4 : 3) * size(c.channels),
           turns, [&](size_t i) { norm_backward(cuda, y[i], dw, db, g[i], x[i], w, statistics, adds); });
    const Tensor positions = tensors(1, {c.context, c.channels})[0];
    show("x + positions", 2 * size(c.channels), turns, [&](size_t i) {
      y[i] = (Variable(x[i].reshape({-1, c.context, c.channels})) + Variable(positions)).value();
    });
  }
  for (int64_t factor : {1, 3, 4}) {
    const size_t turns = turns_of(size(factor * c.channels));
    auto g = tensors(turns, {c.rows, factor * c.channels});
    show(("sums of " + std::to_string(factor * c.channels) + " columns").c_str(), size(factor * c.channels),
         turns, [&](size_t i) { sum_to(g[i], {factor * c.channels}); });
  }
  {
    const int64_t hidden = 4 * c.channels;
    const size_t turns = turns_of(size(hidden));
    auto x = tensors(turns, {c.rows, hidden}), g = tensors(turns, {c.rows, hidden}),
         dx = tensors(turns, {c.rows, hidden});
    show("gelu", 2 * size(hidden), turns, [&](size_t i) { gelu_forward(cuda, dx[i], x[i]); });
    show("gelu backward", 3 * size(hidden), turns, [&](size_t i) { gelu_backward(cuda, dx[i], g[i], x[i]); });
    Tensor sums = Tensor::empty({hidden}, bf16, cuda);
    bool done = false;
    show("gelu backward with sums", 3 * size(hidden), turns,
         [&](size_t i) { gelu_backward_and_sums(cuda, dx[i], sums, g[i], x[i], done); });
  }
  const Tensor uniform = randint({c.rows}, 0, c.vocabulary).to(cuda);
  {
    const size_t turns = c.vocabulary > 1000 ? 2 : 24;
    auto x = tensors(turns, {c.rows, c.vocabulary}), dx = tensors(1, {c.rows, c.vocabulary});
    Tensor loss = Tensor::empty({}, f32, cuda), statistics = Tensor::empty({c.rows, 2}, f32, cuda);
    const Tensor one = Tensor::full({}, 1, f32, cuda);
    show("cross_entropy", size(c.vocabulary), turns,
         [&](size_t i) { loss_forward(cuda, loss, statistics, x[i], uniform, ignore_none, 0); });
    show("cross_entropy backward", 2 * size(c.vocabulary), turns,
         [&](size_t i) { loss_backward(cuda, dx[0], one, x[i], uniform, statistics, ignore_none, 0); });
  }
  {
    // Of tokens all alike, and of text by bytes, where a few are frequent.
    Tensor text = Tensor::empty({c.rows}, i64);
    const Tensor luck = rand({c.rows}, 0, 1);
    for (int64_t i = 0; i < c.rows; ++i)
      text.mutable_data<int64_t>()[i] = static_cast<int64_t>(64 * std::pow(luck.data<float>()[i], 4));
    text = text.to(cuda);
    Tensor table = tensors(1, {c.vocabulary, c.channels})[0], dw = table.clone();
    auto g = tensors(2, {c.rows, c.channels});
    for (const auto& [name, indices] : {std::pair{"uniform", uniform}, std::pair{"text", text}}) {
      show((std::string("embedding, ") + name).c_str(), 2 * size(c.channels), 2,
           [&](size_t i) { embedding_forward(cuda, g[i], table, indices); });
      show((std::string("embedding backward, ") + name).c_str(), size(c.channels) + 2.0 * double(dw.numel()),
           2, [&](size_t i) { embedding_backward(cuda, dw, g[i], indices, false); });
    }
  }
  {
    std::vector<NamedParameter> parameters;
    Parameter parameter(tensors(1, {c.parameters})[0]);
    parameter.mutable_grad() = tensors(1, {c.parameters})[0];
    parameters.push_back({"p", parameter});
    AdamW optimizer(parameters, {.lr = 1e-4});
    show("adamw", 28.0 * static_cast<double>(c.parameters), 1, [&](size_t) { optimizer.step(); });
    const std::vector<Parameter> all = {parameter};
    show("grad_norm", 2.0 * static_cast<double>(c.parameters), 1, [&](size_t) { grad_norm(all); });
  }
}

}  // namespace

int main(int argc, char** argv) { return torus::bench::run_cases(argc, argv, cases, measure); }
