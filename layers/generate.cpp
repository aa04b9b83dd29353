#include "torus/layers/generate.h"

#include <algorithm>
#include <cmath>

#include "torus/ops/ops.h"

namespace torus {

namespace {

int64_t sample(const double* logits, int64_t count, double temperature, Generator& generator) {
  const double* best = std::max_element(logits, logits + count);
  if (temperature == 0) return best - logits;
  std::vector<double> sums;  // running
  double total = 0;
  for (int64_t i = 0; i < count; ++i) sums.push_back(total += std::exp((logits[i] - *best) / temperature));
  const auto found = std::upper_bound(sums.begin(), sums.end(), generator.uniform() * total);
  return std::min<int64_t>(found - sums.begin(), count - 1);
}

}  // namespace

Tensor generate(const GPT& model, const Tensor& prompts, const GenerateOptions& options) {
  check(prompts.dim() == 2 && prompts.size(1) >= 1, Error::Kind::Shape,
        "[generate] expected prompts [B, T] of at least one token, got ", prompts.shape());
  check(options.temperature >= 0 && options.count >= 0, Error::Kind::Value,
        "[generate] count and temperature must be at least 0, got ", options.count, " and ",
        options.temperature);
  Generator& generator = options.generator ? *options.generator : default_generator();
  const int64_t rows = prompts.size(0), start = prompts.size(1), end = start + options.count;
  const int64_t vocabulary = model.config().vocab_size, context = model.config().context;
  const NoGrad only_forward;
  Tensor result = Tensor::empty({rows, end}, i64);
  result.slice(1, 0, start).copy_(prompts);
  for (int64_t at = start; at < end; ++at) {
    const Variable features = model.features(result.slice(1, std::max<int64_t>(0, at - context), at));
    const auto logits =
        model.logits(slice(features, 1, features.size(1) - 1, features.size(1))).value().to_vector<double>();
    check(std::all_of(logits.begin(), logits.end(), [](double x) { return std::isfinite(x); }),
          Error::Kind::Value, "[generate] the logits are not finite");
    int64_t* tokens = result.mutable_data<int64_t>();
    for (int64_t row = 0; row < rows; ++row)
      tokens[row * end + at] =
          sample(logits.data() + row * vocabulary, vocabulary, options.temperature, generator);
  }
  return result;
}

}  // namespace torus
