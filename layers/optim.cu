#include "torus/core/cuda.h"
#include "torus/layers/optim_kernels.h"

namespace torus {

namespace {

using namespace optim;

// ------------------------------------------------------------------------------------ many tensors at once

constexpr int64_t chunk = 16384;  // elements of a block
constexpr int threads = 256;

// Tensors that one launch works on, in the kernel's parameters, of which there may be 4 KB: a step launches a
// few kernels, not one a parameter, and a captured step keeps the table.
template <class Entry, int most>
struct Table {
  Entry entries[most];
  uint32_t first_block[most + 1];
  int count = 0;

  void add(const Entry& entry) {
    if (count == 0) first_block[0] = 0;
    entries[count] = entry;
    first_block[count + 1] = first_block[count] + static_cast<uint32_t>((entry.count + chunk - 1) / chunk);
    ++count;
  }
  bool full() const { return count == most; }
  unsigned blocks() const { return count == 0 ? 0 : first_block[count]; }

  // The entry that this block works on; an entry without elements has no block.
  __device__ int find() const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (first_block[middle] <= blockIdx.x)
        low = middle;
      else
        high = middle - 1;
    }
    return low;
  }
  // Its elements.
  __device__ int64_t begin(int entry) const { return (blockIdx.x - first_block[entry]) * chunk; }
  __device__ int64_t end(int entry) const { return min(begin(entry) + chunk, entries[entry].count); }
};

// Four elements, moved at once (f64: in two moves).
template <class T>
struct alignas(sizeof(T) * 4 < 16 ? sizeof(T) * 4 : 16) Four {
  T at[4];
};
template <class T>
bool is_aligned_four(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % alignof(Four<T>) == 0;
}

// Calls each(i, 4) for four elements from i at a time where `fours`, and each(i, 1) for the rest.
template <class Each>
__device__ inline void walk(int64_t begin, int64_t end, bool fours, const Each& each) {
  const int64_t middle = fours ? begin + (end - begin) / 4 * 4 : begin;
  for (int64_t i = begin + 4 * threadIdx.x; i < middle; i += 4 * threads)
    each(i, std::integral_constant<int, 4>{});
  for (int64_t i = middle + threadIdx.x; i < end; i += threads) each(i, std::integral_constant<int, 1>{});
}

template <int width, class T>
struct Moved {
  using type = Four<T>;
};
template <class T>
struct Moved<1, T> {
  struct type {
    T at[1];
  };
};
template <int width, class T>
__device__ inline typename Moved<width, T>::type load(const T* from) {
  return *reinterpret_cast<const typename Moved<width, T>::type*>(from);
}
template <int width, class T>
__device__ inline void store(T* to, const typename Moved<width, T>::type& value) {
  *reinterpret_cast<typename Moved<width, T>::type*>(to) = value;
}

// ------------------------------------------------------------------------------------------------ rules

// What a kernel knows of a parameter's step, computed once, in f64.
struct Prepared {
  double go;                       // 0: the step is skipped
  double grad;                     // factor of the gradient
  double lr, decay;                // with the parameter's scales
  double correction1, root_scale;  // 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t)
};

template <class P>
struct AdamW {
  static constexpr int moments = 2;
  P keep, beta1, beta2, new1, new2, rate, root_scale, eps;

  __device__ AdamW(const AdamWRule& rule, const Prepared& of)
      : keep(P(1 - of.lr * of.decay)),
        beta1(P(rule.beta1)),
        beta2(P(rule.beta2)),
        new1(P(1 - rule.beta1)),
        new2(P(1 - rule.beta2)),
        rate(P(of.lr * of.correction1)),
        root_scale(P(of.root_scale)),
        eps(P(rule.eps)) {}
  __device__ void operator()(P& p, P& m, P& v, P g) const {
    m = beta1 * m + new1 * g;
    v = beta2 * v + new2 * g * g;
    p = keep * p - rate * m / (root_scale * sqrt(v) + eps);
  }
};

template <class P>
struct PlainSGD {
  static constexpr int moments = 0;
  P lr, decay;

  __device__ PlainSGD(const SGDRule&, const Prepared& of) : lr(P(of.lr)), decay(P(of.decay)) {}
  __device__ void operator()(P& p, P&, P&, P g) const { p -= lr * (g + decay * p); }
};

template <class P>
struct MomentumSGD {
  static constexpr int moments = 1;
  P lr, decay, momentum;
  bool nesterov;

  __device__ MomentumSGD(const SGDRule& rule, const Prepared& of)
      : lr(P(of.lr)), decay(P(of.decay)), momentum(P(rule.momentum)), nesterov(rule.nesterov) {}
  __device__ void operator()(P& p, P& m, P&, P g) const {
    g += decay * p;
    m = momentum * m + g;
    p -= lr * (nesterov ? g + momentum * m : m);
  }
};

template <class P>
struct Lion {
  static constexpr int moments = 1;
  P keep, lr, beta1, beta2, new1, new2;

  __device__ Lion(const LionRule& rule, const Prepared& of)
      : keep(P(1 - of.lr * of.decay)),
        lr(P(of.lr)),
        beta1(P(rule.beta1)),
        beta2(P(rule.beta2)),
        new1(P(1 - rule.beta1)),
        new2(P(1 - rule.beta2)) {}
  __device__ void operator()(P& p, P& m, P&, P g) const {
    const P direction = beta1 * m + new1 * g;
    const P sign = direction > 0 ? P(1) : direction < 0 ? P(-1) : direction;  // a NaN stays one
    p = keep * p - lr * sign;
    m = beta2 * m + new2 * g;
  }
};

// ------------------------------------------------------------------------------------------------ steps

struct StepEntry {
  void *value, *narrow, *first, *second;
  const void* grad;
  int64_t count;
  double lr_scale, decay;
  int32_t index;
  bool fours;
};
using StepTable = Table<StepEntry, 44>;
static_assert(sizeof(StepTable) < 3900);

// Counts t and prepares each entry's numbers. A norm that is not finite skips the step.
__global__ void prepare_steps(Prepared* prepared, double* steps, const __grid_constant__ StepTable table,
                              gpu::Replayed<double> lr, const double* norm, double max_norm,
                              double grad_scale, const double* loss_scale, double beta1, double beta2) {
  const int i = threadIdx.x;
  if (i >= table.count) return;
  const StepEntry& entry = table.entries[i];
  Prepared result{};
  const double size = norm ? *norm : 0;
  if (isfinite(size)) {
    const double t = steps[entry.index] + 1;
    steps[entry.index] = t;
    result.go = 1;
    const double scale = loss_scale ? grad_scale / *loss_scale : grad_scale;
    result.grad = size * scale > max_norm ? max_norm / size : scale;
    result.lr = lr.get() * entry.lr_scale;
    result.decay = entry.decay;
    result.correction1 = 1 / (1 - pow(beta1, t));
    result.root_scale = 1 / sqrt(1 - pow(beta2, t));
  }
  prepared[i] = result;
}

// P: what is stepped; G: the gradient, and if of 16 bits, the parameter.
template <class P, class G, class Update, class Rule>
__global__ void __launch_bounds__(threads)
    step_tensors(const Prepared* __restrict__ prepared, const __grid_constant__ StepTable table, Rule rule) {
  const int at = table.find();
  const Prepared of = prepared[at];
  if (of.go == 0) return;
  const StepEntry& entry = table.entries[at];
  const Update update(rule, of);
  const P factor = P(of.grad);
  P* const value = static_cast<P*>(entry.value);
  P* const first = static_cast<P*>(entry.first);
  P* const second = static_cast<P*>(entry.second);
  G* const narrow = static_cast<G*>(entry.narrow);
  const G* const grad = static_cast<const G*>(entry.grad);
  walk(table.begin(at), table.end(at), entry.fours, [&](int64_t i, auto size) {
    constexpr int width = decltype(size)::value;
    const auto g = load<width>(grad + i);
    auto p = load<width>(value + i);
    typename Moved<width, P>::type m{}, v{};
    if constexpr (Update::moments > 0) m = load<width>(first + i);
    if constexpr (Update::moments > 1) v = load<width>(second + i);
#pragma unroll
    for (int j = 0; j < width; ++j)
      update(p.at[j], m.at[j], v.at[j], factor * static_cast<P>(gpu::widen(g.at[j])));
    store<width>(value + i, p);
    if constexpr (Update::moments > 0) store<width>(first + i, m);
    if constexpr (Update::moments > 1) store<width>(second + i, v);
    if constexpr (gpu::is_16_bit<G>) {
      typename Moved<width, G>::type rounded;
#pragma unroll
      for (int j = 0; j < width; ++j) rounded.at[j] = gpu::narrow<G>(p.at[j]);
      store<width>(narrow + i, rounded);
    }
  });
}

// Row-major stand-ins for tensors that are not, copied back at the end.
class InOrder {
 public:
  void operator()(Tensor& tensor) {
    if (!tensor.defined() || tensor.is_contiguous()) return;
    Tensor stand_in = tensor.contiguous();
    replaced_.emplace_back(tensor, stand_in);
    tensor = stand_in;
  }
  void copy_back() {
    for (auto& [original, stand_in] : replaced_) original.copy_(stand_in);
  }

 private:
  std::vector<std::pair<Tensor, Tensor>> replaced_;
};

template <class P, class G, class Update, class Rule>
void launch_steps(const char* op, const std::vector<StepItem*>& items, const StepNumbers& numbers,
                  gpu::Replayed<double> lr, Rule rule, double beta1, double beta2) {
  if (items.empty()) return;
  const Device device = items.front()->value.device();
  const cudaStream_t stream = gpu::stream_of(device);
  Tensor steps = numbers.steps;
  const double* const norm = numbers.grad_norm.defined() ? gpu::read<double>(numbers.grad_norm) : nullptr;
  const double* const loss_scale =
      numbers.loss_scale.defined() ? gpu::read<double>(numbers.loss_scale) : nullptr;
  StepTable table;
  const auto launch = [&] {
    Tensor space = Tensor::empty({table.count, sizeof(Prepared) / sizeof(double)}, f64, device);
    auto* const prepared = reinterpret_cast<Prepared*>(gpu::write<double>(space));
    prepare_steps<<<1, 64, 0, stream>>>(prepared, gpu::write<double>(steps), table, lr, norm,
                                        numbers.max_norm, numbers.grad_scale, loss_scale, beta1, beta2);
    gpu::check_launch(op);
    if (table.blocks() > 0) {
      step_tensors<P, G, Update><<<table.blocks(), threads, 0, stream>>>(prepared, table, rule);
      gpu::check_launch(op);
    }
    table = StepTable{};
  };
  for (StepItem* item : items) {
    StepEntry entry{};
    P* const value = gpu::write<P>(item->value);
    const G* const grad = gpu::read<G>(item->grad);
    G* const narrow = item->narrow.defined() ? gpu::write<G>(item->narrow) : nullptr;
    P* const first = item->first.defined() ? gpu::write<P>(item->first) : nullptr;
    P* const second = item->second.defined() ? gpu::write<P>(item->second) : nullptr;
    entry = {value,
             narrow,
             first,
             second,
             grad,
             item->value.numel(),
             item->lr_scale,
             item->decay,
             static_cast<int32_t>(item->index),
             is_aligned_four(value) && is_aligned_four(narrow) && is_aligned_four(first) &&
                 is_aligned_four(second) && is_aligned_four(grad)};
    table.add(entry);
    if (table.full()) launch();
  }
  if (table.count > 0) launch();
}

template <template <class> class Update, class Rule>
void step(const char* op, std::span<StepItem> items, const StepNumbers& numbers, Rule rule, double beta1,
          double beta2) {
  // The groups: by dtypes, in the parameters' order.
  std::vector<StepItem*> doubles, floats, halves, bfloats;
  InOrder in_order;
  for (StepItem& item : items) {
    in_order(item.value);
    in_order(item.narrow);
    item.grad = item.grad.contiguous();
    (item.grad.dtype() == f64   ? doubles
     : item.grad.dtype() == f32 ? floats
     : item.grad.dtype() == f16 ? halves
                                : bfloats)
        .push_back(&item);
  }
  const gpu::Replayed<double> lr = gpu::replayed(numbers.lr(), numbers.lr);
  launch_steps<double, double, Update<double>>(op, doubles, numbers, lr, rule, beta1, beta2);
  launch_steps<float, float, Update<float>>(op, floats, numbers, lr, rule, beta1, beta2);
  launch_steps<float, __half, Update<float>>(op, halves, numbers, lr, rule, beta1, beta2);
  launch_steps<float, __nv_bfloat16, Update<float>>(op, bfloats, numbers, lr, rule, beta1, beta2);
  in_order.copy_back();
}

void adamw(std::span<StepItem> items, const StepNumbers& numbers, AdamWRule rule) {
  step<AdamW>("adamw", items, numbers, rule, rule.beta1, rule.beta2);
}

void sgd(std::span<StepItem> items, const StepNumbers& numbers, SGDRule rule) {
  if (rule.momentum == 0)
    step<PlainSGD>("sgd", items, numbers, rule, 0, 0);
  else
    step<MomentumSGD>("sgd", items, numbers, rule, 0, 0);
}

void lion(std::span<StepItem> items, const StepNumbers& numbers, LionRule rule) {
  step<Lion>("lion", items, numbers, rule, 0, 0);
}

// ------------------------------------------------------------------------------------- norms and clipping

struct GradEntry {
  const void* grad;
  int64_t count;
};
using GradTable = Table<GradEntry, 128>;

template <class T>
__global__ void __launch_bounds__(threads)
    sum_squares(double* __restrict__ parts, const __grid_constant__ GradTable table) {
  __shared__ double space[32];
  using gpu::Pack;
  constexpr int width = Pack<T>::count, at_once = 4;
  const int at = table.find();
  const T* const grad = static_cast<const T*>(table.entries[at].grad);
  const int64_t begin = table.begin(at), end = table.end(at);
  const bool packed = reinterpret_cast<uintptr_t>(grad) % 16 == 0;
  const int64_t middle = packed ? begin + (end - begin) / width * width : begin;
  double sums[at_once] = {};
  for (int64_t i = begin + int64_t{threadIdx.x} * width; i < middle; i += at_once * threads * width) {
    Pack<T> in[at_once] = {};
#pragma unroll
    for (int k = 0; k < at_once; ++k)
      if (i + k * threads * width < middle)
        in[k] = *reinterpret_cast<const Pack<T>*>(grad + i + k * threads * width);
#pragma unroll
    for (int k = 0; k < at_once; ++k)
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const auto value = static_cast<double>(gpu::widen(in[k].at[j]));
        sums[k] += value * value;
      }
  }
  for (int64_t i = middle + threadIdx.x; i < end; i += threads) {
    const auto value = static_cast<double>(gpu::widen(grad[i]));
    sums[0] += value * value;
  }
  const double sum = gpu::block_sum(sums[0] + sums[1] + (sums[2] + sums[3]), space);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// One block.
__global__ void __launch_bounds__(1024) root_of_sum(double* norm, const double* parts, int64_t count) {
  __shared__ double space[32];
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += 1024) sum += parts[i];
  sum = gpu::block_sum(sum, space);
  if (threadIdx.x == 0) *norm = sqrt(sum);
}

// Calls launch<T>(table) for tables of all non-empty tensors, one dtype after the other.
template <class Launch>
void for_each_table(const char* op, std::span<const Tensor> tensors, Launch launch) {
  for (DType dtype : {f64, f32, f16, bf16})
    gpu::dispatch_floating(dtype, op, [&](auto zero) {
      using T = decltype(zero);
      GradTable table;
      const auto flush = [&] {
        if (table.blocks() > 0) {
          launch(zero, table);
          gpu::check_launch(op);
        }
        table = GradTable{};
      };
      for (const Tensor& tensor : tensors) {
        if (tensor.dtype() != dtype || tensor.numel() == 0) continue;
        table.add({gpu::read<T>(tensor), tensor.numel()});
        if (table.full()) flush();
      }
      flush();
    });
}

void grad_norm(Tensor& norm, std::span<const Tensor> grads) {
  std::vector<Tensor> in_order;
  int64_t blocks = 0;
  for (const Tensor& grad : grads) {
    in_order.push_back(grad.contiguous());
    blocks += (grad.numel() + chunk - 1) / chunk;
  }
  const cudaStream_t stream = gpu::stream_of(norm);
  Tensor space = Tensor::empty({blocks}, f64, norm.device());
  double* const parts = gpu::write<double>(space);
  int64_t done = 0;
  for_each_table("grad_norm", in_order, [&](auto zero, const GradTable& table) {
    sum_squares<decltype(zero)><<<table.blocks(), threads, 0, stream>>>(parts + done, table);
    done += table.blocks();
  });
  root_of_sum<<<1, 1024, 0, stream>>>(gpu::write<double>(norm), parts, done);
  gpu::check_launch("grad_norm");
}

// Multiplies by max_norm / norm where that is less than 1; reads nothing else.
template <class T>
__global__ void __launch_bounds__(threads)
    clip_tensors(const __grid_constant__ GradTable table, const double* norm, double max_norm) {
  const double size = *norm;
  if (!isfinite(size) || size <= max_norm) return;
  using C = gpu::compute<T>;
  const C factor = static_cast<C>(max_norm / size);
  const int at = table.find();
  T* const grad = static_cast<T*>(const_cast<void*>(table.entries[at].grad));
  const bool fours = reinterpret_cast<uintptr_t>(grad) % alignof(Four<T>) == 0;
  walk(table.begin(at), table.end(at), fours, [&](int64_t i, auto width) {
    auto values = load<decltype(width)::value>(grad + i);
#pragma unroll
    for (T& value : values.at) value = gpu::narrow<T>(gpu::widen(value) * factor);
    store<decltype(width)::value>(grad + i, values);
  });
}

void clip(std::span<Tensor> grads, const Tensor& norm, double max_norm) {
  InOrder in_order;
  std::vector<Tensor> all(grads.begin(), grads.end());
  for (Tensor& grad : all) {
    in_order(grad);
    grad.storage()->bump_version();
  }
  const cudaStream_t stream = gpu::stream_of(norm);
  for_each_table("clip_grad_norm", all, [&](auto zero, const GradTable& table) {
    clip_tensors<decltype(zero)>
        <<<table.blocks(), threads, 0, stream>>>(table, gpu::read<double>(norm), max_norm);
  });
  in_order.copy_back();
}

// ------------------------------------------------------------------------------------------ combinations

struct CombineEntry {
  void* to;
  const void* from;
  int64_t count;
  bool add, fours;
};
using CombineTable = Table<CombineEntry, 96>;
static_assert(sizeof(CombineTable) < 3900);

template <class To, class From>
__global__ void __launch_bounds__(threads)
    combine_tensors(const __grid_constant__ CombineTable table, double by) {
  using C = gpu::compute<To>;
  const C factor = static_cast<C>(by);
  const int at = table.find();
  const CombineEntry& entry = table.entries[at];
  To* const to = static_cast<To*>(entry.to);
  const From* const from = static_cast<const From*>(entry.from);
  walk(table.begin(at), table.end(at), entry.fours, [&](int64_t i, auto size) {
    constexpr int width = decltype(size)::value;
    const auto in = load<width>(from + i);
    typename Moved<width, To>::type out{};
    if (entry.add) out = load<width>(to + i);
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const C scaled = static_cast<C>(gpu::widen(in.at[j])) * factor;
      out.at[j] = gpu::narrow<To>(entry.add ? gpu::widen(out.at[j]) + scaled : scaled);
    }
    store<width>(to + i, out);
  });
}

template <class To, class From>
void combine_of(std::span<Combination> all, double factor, DType to_dtype, DType from_dtype) {
  CombineTable table;
  const auto flush = [&](Device device) {
    if (table.blocks() > 0) {
      combine_tensors<To, From><<<table.blocks(), threads, 0, gpu::stream_of(device)>>>(table, factor);
      gpu::check_launch("combine");
    }
    table = CombineTable{};
  };
  for (Combination& one : all) {
    if (one.to.dtype() != to_dtype || one.from.dtype() != from_dtype || one.to.numel() == 0) continue;
    To* const to = gpu::write<To>(one.to);
    const From* const from = gpu::read<From>(one.from);
    table.add({to, from, one.to.numel(), one.add, is_aligned_four(to) && is_aligned_four(from)});
    if (table.full()) flush(one.to.device());
  }
  if (table.count > 0) flush(all.front().to.device());
}

// Of f64 to f64, f32 to f32, and 16 bits to f32 and back: between a parameter and its master.
void combine(std::span<Combination> all, double factor) {
  InOrder in_order;
  for (Combination& one : all) {
    in_order(one.to);
    one.from = one.from.contiguous();
  }
  combine_of<double, double>(all, factor, f64, f64);
  combine_of<float, float>(all, factor, f32, f32);
  combine_of<float, __half>(all, factor, f32, f16);
  combine_of<float, __nv_bfloat16>(all, factor, f32, bf16);
  combine_of<__half, float>(all, factor, f16, f32);
  combine_of<__nv_bfloat16, float>(all, factor, bf16, f32);
  in_order.copy_back();
}

// --------------------------------------------------------------------------------------------- loss scale

__global__ void move_scale(double* state, const double* norm, double growth, int64_t interval) {
  const bool finite = isfinite(*norm);
  const double good = finite ? state[1] + 1 : 0;
  const bool grows = finite && good >= static_cast<double>(interval);
  if (!finite) state[0] /= growth;
  if (grows) state[0] *= growth;
  state[1] = grows ? 0 : good;
}

void update_scale(Tensor& state, const Tensor& norm, double growth, int64_t interval) {
  move_scale<<<1, 1, 0, gpu::stream_of(state)>>>(gpu::write<double>(state), gpu::read<double>(norm), growth,
                                                 interval);
  gpu::check_launch("loss_scale");
}

const CudaKernel<StepFunction<AdamWRule>> adamw_kernel{"adamw.step", adamw};
const CudaKernel<StepFunction<SGDRule>> sgd_kernel{"sgd.step", sgd};
const CudaKernel<StepFunction<LionRule>> lion_kernel{"lion.step", lion};
const CudaKernel<NormFunction> norm_kernel{"grad_norm", grad_norm};
const CudaKernel<ClipFunction> clip_kernel{"clip_grad_norm", clip};
const CudaKernel<ScaleFunction> scale_kernel{"loss_scale.update", update_scale};
const CudaKernel<CombineFunction> combine_kernel{"weights.combine", combine};

}  // namespace

}  // namespace torus
