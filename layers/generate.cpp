#include "torus/layers/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "torus/ops/ops.h"

namespace torus {

namespace {

int64_t sample(const double* logits, int64_t count, const GenerateOptions& options, Generator& generator) {
  const double best = *std::max_element(logits, logits + count);
  if (options.temperature == 0) return std::find(logits, logits + count, best) - logits;
  const auto weight = [&](int64_t i) { return std::exp((logits[i] - best) / options.temperature); };
  std::vector<int64_t> tokens(static_cast<size_t>(count));  // that may be drawn
  std::iota(tokens.begin(), tokens.end(), 0);
  if (options.top_k > 0 || options.top_p < 1)
    std::stable_sort(tokens.begin(), tokens.end(),
                     [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
  if (options.top_k > 0 && options.top_k < count) tokens.resize(static_cast<size_t>(options.top_k));
  std::vector<double> sums;  // running
  double total = 0;
  for (int64_t token : tokens) sums.push_back(total += weight(token));
  if (options.top_p < 1) {
    const auto last = std::lower_bound(sums.begin(), sums.end(), options.top_p * total);
    total = *last;
    sums.erase(last + 1, sums.end());
  }
  const auto found = std::upper_bound(sums.begin(), sums.end(), generator.uniform() * total);
  return tokens[std::min(static_cast<size_t>(found - sums.begin()), sums.size() - 1)];
}

}  // namespace

Tensor generate(const GPT& model, const Tensor& prompts, const GenerateOptions& options) {
  check(prompts.dim() == 2 && prompts.size(1) >= 1, Error::Kind::Shape,
        "[generate] expected prompts [B, T] of at least one token, got ", prompts.shape());
  check(prompts.dtype() == i64, Error::Kind::DType, "[generate] expected prompts of i64, got ",
        prompts.dtype());
  check(options.temperature >= 0 && options.count >= 0, Error::Kind::Value,
        "[generate] count and temperature must be at least 0, got ", options.count, " and ",
        options.temperature);
  check(options.top_k >= 0 && options.top_p > 0 && options.top_p <= 1, Error::Kind::Value,
        "[generate] expected top_k >= 0 and 0 < top_p <= 1, got ", options.top_k, " and ", options.top_p);
  Generator& generator = options.generator ? *options.generator : default_generator();
  const int64_t rows = prompts.size(0), start = prompts.size(1), end = start + options.count;
  const int64_t vocabulary = model.config().vocab_size, context = model.config().context;
  const NoGrad only_forward;
  Tensor result = Tensor::empty({rows, end}, i64);
  result.slice(1, 0, start).copy_(prompts);
  GPTCache cache;
  for (int64_t at = start; at < end; ++at) {
    const Variable features = at <= context ? model.features(result.slice(1, cache.length, at), cache)
                                            : model.features(result.slice(1, at - context, at));
    const auto logits =
        model.logits(slice(features, 1, features.size(1) - 1, features.size(1))).value().to_vector<double>();
    check(std::all_of(logits.begin(), logits.end(), [](double x) { return std::isfinite(x); }),
          Error::Kind::Value, "[generate] the logits are not finite");
    int64_t* tokens = result.mutable_data<int64_t>();
    for (int64_t row = 0; row < rows; ++row)
      tokens[row * end + at] = sample(logits.data() + row * vocabulary, vocabulary, options, generator);
  }
  return result;
}

}  // namespace torus
