// Matrix products on CUDA, by cuBLASLt.
#include <cublasLt.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "torus/core/cuda.h"
#include "torus/core/gemm.h"
#include "torus/core/memory.h"
#include "torus/core/random.h"

namespace torus {

namespace {

using namespace gpu;

void check_cublas(cublasStatus_t status) {
  check(status == CUBLAS_STATUS_SUCCESS, Error::Kind::Device,
        "[product] cuBLASLt: ", cublasLtGetStatusString(status));
}

constexpr size_t workspace_bytes = size_t{32} << 20;

// What a device needs for products, kept for good: its work is on one stream, so one workspace is enough.
struct Library {
  cublasLtHandle_t handle = nullptr;
  void* workspace = nullptr;
};
Library& library(Device device) {
  static std::mutex mutex;
  static auto* libraries = new std::map<int, Library>;
  std::lock_guard lock(mutex);
  Library& found = (*libraries)[device.index];
  if (!found.workspace) found.workspace = allocate_for_good(workspace_bytes, device);
  if (!found.handle) check_cublas(cublasLtCreate(&found.handle));
  return found;
}

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case f64:
      return CUDA_R_64F;
    case f16:
      return CUDA_R_16F;
    case bf16:
      return CUDA_R_16BF;
    default:
      return CUDA_R_32F;
  }
}

// What a product does with its result on the way out: `vector` is a bias; `matrix` is the input of GELU, or
// gets it.
struct Epilogue {
  cublasLtEpilogue_t kind = CUBLASLT_EPILOGUE_DEFAULT;
  const void *vector = nullptr, *matrix = nullptr;

  // Others are possible always.
  bool optional() const { return kind != CUBLASLT_EPILOGUE_DEFAULT && kind != CUBLASLT_EPILOGUE_BIAS; }
};

// One product, or a batch of equal distance, in the column-major terms of cuBLAS: d [m, n] = a b.
struct Plan {
  struct Operand {
    int64_t leading = 1, batch_stride = 0;
    bool transposed = false;
    int alignment = 256;  // of its address, in bytes
    bool operator<(const Operand& o) const {
      return std::tie(leading, batch_stride, transposed, alignment) <
             std::tie(o.leading, o.batch_stride, o.transposed, o.alignment);
    }
  };
  DType dtype;
  int64_t m, n, k, batches;
  Operand a, b, d;
  int vector_alignment;  // of the epilogue's
  cublasLtEpilogue_t epilogue;
  bool adds, tf32;
  int device;

  bool operator<(const Plan& o) const {
    return std::tie(dtype, m, n, k, batches, a, b, d, vector_alignment, epilogue, adds, tf32, device) <
           std::tie(o.dtype, o.m, o.n, o.k, o.batches, o.a, o.b, o.d, o.vector_alignment, o.epilogue, o.adds,
                    o.tf32, o.device);
  }
};

// With a name, without which nvcc has no vectors of them.
struct Algorithm : cublasLtMatmulAlgo_t {};

// The descriptors of a plan and the algorithm chosen for it, if there is one; kept for good.
struct Prepared {
  bool possible = false;
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
  Algorithm algorithm = {};
  std::vector<Algorithm> others;  // that may be faster, and have not been measured yet
};

cublasLtMatrixLayout_t layout(const Plan& plan, const Plan::Operand& x, int64_t rows, int64_t columns) {
  cublasLtMatrixLayout_t result = nullptr;
  if (x.transposed) std::swap(rows, columns);
  check_cublas(cublasLtMatrixLayoutCreate(&result, type_of(plan.dtype), static_cast<uint64_t>(rows),
                                          static_cast<uint64_t>(columns), x.leading));
  const auto batches = static_cast<int32_t>(plan.batches);
  check_cublas(
      cublasLtMatrixLayoutSetAttribute(result, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batches, sizeof batches));
  check_cublas(cublasLtMatrixLayoutSetAttribute(result, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                &x.batch_stride, sizeof x.batch_stride));
  return result;
}

// What they point to decides, by its alignment, which algorithms there are.
void set_operands(cublasLtMatmulDescOpaque_t& operation, const Epilogue& epilogue) {
  if (epilogue.vector)
    check_cublas(cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                &epilogue.vector, sizeof epilogue.vector));
  if (epilogue.matrix)
    check_cublas(cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                                                &epilogue.matrix, sizeof epilogue.matrix));
}

constexpr int most_candidates = 8;

double results_of(const Plan& plan) {
  return static_cast<double>(plan.m) * static_cast<double>(plan.n * plan.batches);
}
double multiply_adds(const Plan& plan) { return results_of(plan) * static_cast<double>(plan.k); }

// Whether its algorithm is chosen by measurement: products that take long enough to be timed, with results
// enough that a different order of sums shows in some.
bool worth_measuring(const Plan& plan) {
  return size_of(plan.dtype) == 2 && results_of(plan) >= 65536 && multiply_adds(plan) >= 1e9;
}

// The algorithm is the one that cuBLASLt expects to be the fastest; the others are its next ones.
Prepared prepare(const Plan& plan, const Library& cublas, const Epilogue& epilogue) {
  Prepared made;
  const cublasComputeType_t arithmetic = plan.dtype == f64 ? CUBLAS_COMPUTE_64F
                                         : plan.tf32       ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                           : CUBLAS_COMPUTE_32F;
  check_cublas(
      cublasLtMatmulDescCreate(&made.operation, arithmetic, plan.dtype == f64 ? CUDA_R_64F : CUDA_R_32F));
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    check_cublas(cublasLtMatmulDescSetAttribute(made.operation, attribute, &value, sizeof value));
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, plan.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_TRANSB, plan.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_EPILOGUE, plan.epilogue);
  if (epilogue.optional()) set_operands(*made.operation, epilogue);
  if (epilogue.vector) set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(plan.dtype));
  if (epilogue.matrix) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, plan.d.leading);
  made.a = layout(plan, plan.a, plan.m, plan.k);
  made.b = layout(plan, plan.b, plan.k, plan.n);
  made.d = layout(plan, plan.d, plan.m, plan.n);

  cublasLtMatmulPreference_t preference = nullptr;
  check_cublas(cublasLtMatmulPreferenceCreate(&preference));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check_cublas(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(plan.a.alignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(plan.b.alignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(plan.d.alignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(plan.d.alignment));
  cublasLtMatmulHeuristicResult_t found[most_candidates] = {};
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(cublas.handle, made.operation, made.a, made.b, made.d, made.d,
                                     preference, worth_measuring(plan) ? most_candidates : 1, found, &count);
  cublasLtMatmulPreferenceDestroy(preference);
  made.possible = status == CUBLAS_STATUS_SUCCESS && count > 0;
  if (!made.possible) return made;
  made.algorithm = {found[0].algo};
  for (int i = 1; i < count; ++i)
    if (found[i].state == CUBLAS_STATUS_SUCCESS) made.others.push_back({found[i].algo});
  return made;
}

// Where the operands of a product d = a b + added lie.
struct Places {
  const void *a, *b, *added;
  void* d;
  Epilogue epilogue;
};

// C: what it is summed in.
template <class C>
cublasStatus_t start(const Library& cublas, const Prepared& ready, const Algorithm& algorithm,
                     const Places& at, bool adds, cudaStream_t stream) {
  // The prepared one is shared between threads.
  cublasLtMatmulDescOpaque_t operation;
  std::memcpy(&operation, ready.operation, sizeof operation);
  set_operands(operation, at.epilogue);
  const C alpha = 1, beta = adds ? 1 : 0;
  return cublasLtMatmul(cublas.handle, &operation, &alpha, at.a, ready.a, at.b, ready.b, &beta, at.added,
                        ready.d, at.d, ready.d, &algorithm, cublas.workspace, workspace_bytes, stream);
}

// ------------------------------------------------------------------------------- algorithms by measurement

constexpr size_t most_scratch_bytes = size_t{2} << 30;

// Memory for a moment, which no figure counts; null where there is too little.
class Scratch {
 public:
  Scratch(size_t bytes, int device, cudaStream_t stream) : stream_(stream) {
    check_call(cudaDeviceGetDefaultMemPool(&pool_, device), "product");
    check_call(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemCurrent, &reserved_), "product");
    const cudaError_t error = cudaMallocAsync(&data_, bytes, stream);
    if (error == cudaSuccess) return;
    data_ = nullptr;
    if (error != cudaErrorMemoryAllocation) check_call(error, "product");
    cudaGetLastError();  // taken note of: the next check is about the next call
  }
  ~Scratch() {
    if (!data_) return;
    cudaFreeAsync(data_, stream_);
    cudaStreamSynchronize(stream_);
    cudaMemPoolTrimTo(pool_, reserved_);  // else the pool would keep it
    cudaGetLastError();
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  cudaStream_t stream_;
  cudaMemPool_t pool_ = nullptr;
  uint64_t reserved_ = 0;
  void* data_ = nullptr;
};

// Times what a captured step would launch: a graph, in which what a product puts before its kernel, such as
// memory set to 0, takes longer than on the stream alone.
class Stopwatch {
 public:
  Stopwatch() {
    check_call(cudaEventCreate(&begin_), "product");
    check_call(cudaEventCreate(&end_), "product");
    check_call(cudaStreamCreateWithFlags(&recorder_, cudaStreamNonBlocking), "product");
  }
  ~Stopwatch() {
    for (cudaGraphExec_t graph : graphs_) cudaGraphExecDestroy(graph);
    cudaStreamDestroy(recorder_);
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  // What f(stream) puts on the stream, to be launched on another; null where it cannot be, as f may say.
  template <class F>
  cudaGraphExec_t record(cudaStream_t stream, F&& f) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check_call(cudaStreamBeginCapture(recorder_, cudaStreamCaptureModeRelaxed), "product");
    const bool complete = f(recorder_);
    if (cudaStreamEndCapture(recorder_, &graph) == cudaSuccess && complete &&
        cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess) {
      graphs_.push_back(executable);
      cudaGraphUpload(executable, stream);
    }
    if (graph) cudaGraphDestroy(graph);
    cudaGetLastError();  // taken note of: the next check is about the next call
    return executable;
  }
  // Milliseconds that it takes on the stream.
  float time(cudaStream_t stream, cudaGraphExec_t graph) const {
    check_call(cudaEventRecord(begin_, stream), "product");
    check_call(cudaGraphLaunch(graph, stream), "product");
    check_call(cudaEventRecord(end_, stream), "product");
    check_call(cudaEventSynchronize(end_), "product");
    float milliseconds = 0;
    check_call(cudaEventElapsedTime(&milliseconds, begin_, end_), "product");
    return milliseconds;
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  cudaStream_t recorder_ = nullptr;  // its own, as others may use the device's
  std::vector<cudaGraphExec_t> graphs_;
};

// Eight floats of 16 bits a pack, of either sign: `lowest` and what `varies` adds to it are exponents and
// fractions.
__global__ void fill_scratch(uint4* to, int64_t packs, uint32_t lowest, uint32_t varies) {
  const uint32_t mask = (0x8000u | varies) * 0x10001u, least = lowest * 0x10001u;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < packs; i += stride) {
    const auto random = philox({static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32), 0, 0}, 0);
    to[i] = {(random[0] & mask) + least, (random[1] & mask) + least, (random[2] & mask) + least,
             (random[3] & mask) + least};
  }
}

__global__ void find_difference(int* differs, const uint4* a, const uint4* b, int64_t packs) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < packs; i += stride) {
    const uint4 x = a[i], y = b[i];
    if (x.x != y.x || x.y != y.y || x.z != y.z || x.w != y.w) *differs = 1;
  }
}

// Elements from the first to the last of a matrix [rows, columns] of a plan, or of a batch of them.
int64_t extent(const Plan& plan, const Plan::Operand& x, int64_t rows, int64_t columns) {
  if (x.transposed) std::swap(rows, columns);
  return (plan.batches - 1) * x.batch_stride + (columns - 1) * x.leading + rows;
}

// The fastest of the algorithms, on operands made up for it, whose results have all the bits of those of the
// first: so results do not depend on what was measured. The first where there is no memory for it.
Algorithm fastest(const Plan& plan, const Library& cublas, const Prepared& ready, const Epilogue& epilogue,
                  cudaStream_t stream) {
  const Algorithm& first = ready.algorithm;
  size_t bytes = 0;
  const auto place = [&](int64_t elements, int alignment) {
    const size_t at = bytes + static_cast<size_t>(alignment % 256);
    bytes = (at + static_cast<size_t>(elements) * 2 + 255) / 256 * 256;
    return at;
  };
  const int64_t result_extent = extent(plan, plan.d, plan.m, plan.n);
  const size_t flags = place(2 * most_candidates, 256),
               a = place(extent(plan, plan.a, plan.m, plan.k), plan.a.alignment),
               b = place(extent(plan, plan.b, plan.k, plan.n), plan.b.alignment),
               vector = place(plan.m, plan.vector_alignment),
               added = plan.adds ? place(result_extent, plan.d.alignment) : 0;
  // What is written: once by the first, once by each of the others.
  const size_t results = bytes, d = place(result_extent, plan.d.alignment),
               matrix = epilogue.matrix ? place(result_extent, plan.d.alignment) : 0,
               result_bytes = bytes - results;
  bytes += result_bytes;
  if (bytes > most_scratch_bytes) return first;
  const Scratch scratch(bytes, plan.device, stream);
  std::byte* const data = scratch.data();
  if (!data) return first;

  constexpr int threads = 256;
  const auto packs = [&](size_t at) { return reinterpret_cast<uint4*>(data + at); };
  // Of eight powers of 2, the highest below 1: their products have more bits than a sum in f32 keeps, so that
  // sums in another order differ.
  const auto fill = [&](size_t at, size_t size) {
    const auto count = static_cast<int64_t>(size / sizeof(uint4));
    const bool half = plan.dtype == f16;
    fill_scratch<<<blocks_for(count, threads, 1 << 14), threads, 0, stream>>>(
        packs(at), count, half ? 7 << 10 : 119 << 7, half ? 0x1fff : 0x3ff);
    check_launch("product");
  };
  fill(0, results);
  fill(results, result_bytes);
  fill(results + result_bytes, result_bytes);
  int* const differ = reinterpret_cast<int*>(data + flags);
  check_call(cudaMemsetAsync(differ, 0, most_candidates * sizeof(int), stream), "product");

  const auto run = [&](const Algorithm& algorithm, size_t shift, cudaStream_t on) {
    const Epilogue there{epilogue.kind, epilogue.vector ? data + vector : nullptr,
                         epilogue.matrix ? data + matrix + shift : nullptr};
    std::byte* const to = data + d + shift;
    const bool runs =
        start<float>(cublas, ready, algorithm, {data + a, data + b, plan.adds ? data + added : to, to, there},
                     plan.adds, on) == CUBLAS_STATUS_SUCCESS;
    if (!runs) cudaGetLastError();  // taken note of: the next check is about the next call
    return runs;
  };
  if (!run(first, 0, stream)) return first;
  std::vector<Algorithm> tried, alike{first};
  for (const Algorithm& other : ready.others) {
    if (!run(other, result_bytes, stream)) continue;
    const auto count = static_cast<int64_t>(result_bytes / sizeof(uint4));
    find_difference<<<blocks_for(count, threads, 1 << 14), threads, 0, stream>>>(
        differ + tried.size(), packs(results), packs(results + result_bytes), count);
    check_launch("product");
    tried.push_back(other);
  }
  int found[most_candidates] = {};
  check_call(cudaMemcpyAsync(found, differ, sizeof found, cudaMemcpyDeviceToHost, stream), "product");
  check_call(cudaStreamSynchronize(stream), "product");
  for (size_t i = 0; i < tried.size(); ++i)
    if (!found[i]) alike.push_back(tried[i]);
  if (alike.size() == 1) return first;

  Stopwatch watch;
  const int rounds = 3, runs = std::clamp(static_cast<int>(5e10 / multiply_adds(plan)), 1, 8);
  std::vector<cudaGraphExec_t> graphs;
  for (const Algorithm& algorithm : alike)
    graphs.push_back(watch.record(stream, [&](cudaStream_t on) {
      bool all = true;
      for (int i = 0; i < runs; ++i) all = all && run(algorithm, result_bytes, on);
      return all;
    }));
  if (std::ranges::count(graphs, nullptr)) return first;
  // In turns, so that all meet the same clock rates; what is far behind takes no further one.
  std::vector<float> least(alike.size(), std::numeric_limits<float>::infinity());
  for (int round = 0; round < rounds; ++round) {
    const float before = *std::ranges::min_element(least);
    for (size_t i = 0; i < alike.size(); ++i) {
      if (least[i] > 1.1f * before) continue;
      run(alike[i], result_bytes, stream);  // meanwhile the host gets ahead
      least[i] = std::min(least[i], watch.time(stream, graphs[i]));
    }
  }
  const auto best = static_cast<size_t>(std::ranges::min_element(least) - least.begin());
  return least[best] < 0.97f * least[0] ? alike[best] : first;
}

// A copy, as a plan that was met under capture is measured later.
Prepared prepared(const Plan& plan, const Library& cublas, const Epilogue& epilogue, cudaStream_t stream) {
  static std::mutex mutex;
  static auto* plans = new std::map<Plan, Prepared>;
  std::lock_guard lock(mutex);
  auto found = plans->find(plan);
  if (found == plans->end()) found = plans->emplace(plan, prepare(plan, cublas, epilogue)).first;
  Prepared& ready = found->second;
  if (ready.others.empty()) return ready;
  cudaStreamCaptureStatus captures = cudaStreamCaptureStatusNone;
  check_call(cudaStreamIsCapturing(stream, &captures), "product");
  if (captures == cudaStreamCaptureStatusNone) {
    ready.algorithm = fastest(plan, cublas, ready, epilogue, stream);
    ready.others.clear();
  }
  return ready;
}

// ----------------------------------------------------------------------------------------------- products

int alignment_of(const void* pointer, int64_t batch_bytes) {
  const auto bits = reinterpret_cast<uintptr_t>(pointer) | static_cast<uintptr_t>(batch_bytes) | 256;
  return static_cast<int>(bits & (~bits + 1));
}

// A row-major matrix [rows, columns] is a column-major one [columns, rows]; `x` has a unit stride along one.
template <class T>
Plan::Operand operand(const Tensor& x, const T* data, int64_t batch_stride) {
  const bool rows = x.strides()[-1] == 1 || x.size(-1) == 1;
  // With one row or column its stride says nothing, but cuBLAS wants it no less than the length.
  int64_t leading = rows ? x.strides()[-2] : x.strides()[-1];
  const int64_t length = rows ? x.size(-1) : x.size(-2);
  if ((rows ? x.size(-2) : x.size(-1)) == 1) leading = length;
  return {std::max(leading, length), batch_stride, !rows,
          alignment_of(data, batch_stride * static_cast<int64_t>(sizeof(T)))};
}

bool usable(const Tensor& x) {
  const bool rows = x.strides()[-1] == 1 || x.size(-1) == 1;
  const int64_t leading = rows ? x.strides()[-2] : x.strides()[-1];
  const int64_t length = rows ? x.size(-1) : x.size(-2), count = rows ? x.size(-2) : x.size(-1);
  return count == 1 || leading >= length;  // an expanded or overlapping axis is not
}

// c = a b + addend, which has the strides of c, or c += a b. False, with nothing done, where cuBLASLt does
// not know the epilogue for this product.
template <class T>
bool multiply(Tensor& c, const Tensor& a, const Tensor& b, const Tensor& addend, bool accumulate,
              const Epilogue& epilogue, cudaStream_t stream) {
  const int64_t m = c.size(-2), n = c.size(-1), k = a.size(-1);
  const Library& cublas = library(c.device());
  T* const c_data = write<T>(c);
  const T *const a_data = read<T>(a), *const b_data = read<T>(b);
  const T* const added = addend.defined() ? read<T>(addend) : c_data;
  const bool adds = accumulate || addend.defined();

  // Leading axes from the last on are one batch as long as each operand moves by equal distances.
  const int axes = c.dim() - 2;
  int64_t batches = 1, step[3] = {0, 0, 0};
  const Tensor* const operands[3] = {&c, &a, &b};
  int outer = axes;
  for (; outer > 0; --outer) {
    const int64_t size = c.size(outer - 1);
    if (size == 1) continue;
    if (batches * size > 65535) break;
    bool joins = true;
    for (int t = 0; t < 3; ++t)
      joins = joins && (batches == 1 || operands[t]->strides()[outer - 1] == step[t] * batches);
    if (!joins) break;
    if (batches == 1)
      for (int t = 0; t < 3; ++t) step[t] = operands[t]->strides()[outer - 1];
    batches *= size;
  }
  const int64_t rounds = c.shape().slice(0, outer).numel();
  for (int64_t round = 0; round < rounds; ++round) {
    int64_t offset[3] = {0, 0, 0}, rest = round;
    for (int axis = outer - 1; axis >= 0; --axis) {
      for (int t = 0; t < 3; ++t) offset[t] += rest % c.size(axis) * operands[t]->strides()[axis];
      rest /= c.size(axis);
    }
    const T *const a_at = a_data + offset[1], *const b_at = b_data + offset[2],
                   *const added_at = added + offset[0];
    T* const c_at = c_data + offset[0];
    // c = a b by rows is c^T = b^T a^T by columns.
    Plan plan{.dtype = c.dtype(),
              .m = n,
              .n = m,
              .k = k,
              .batches = batches,
              .a = operand(b, b_at, step[2]),
              .b = operand(a, a_at, step[1]),
              .d = operand(c, c_at, step[0]),
              .vector_alignment = alignment_of(epilogue.vector, 0),
              .epilogue = epilogue.kind,
              .adds = adds,
              .tf32 = c.dtype() == f32 && tf32_allowed(),
              .device = c.device().index};
    plan.d.alignment = std::min(
        {plan.d.alignment, operand(c, added_at, step[0]).alignment, alignment_of(epilogue.matrix, 0)});
    const Prepared ready = prepared(plan, cublas, epilogue, stream);
    if (!ready.possible && epilogue.optional()) return false;
    check(ready.possible, Error::Kind::Device, "[product] cuBLASLt has no algorithm for [", m, ", ", k,
          "] times [", k, ", ", n, "] of ", c.dtype());
    check_cublas(start<compute<T>>(cublas, ready, ready.algorithm, {b_at, a_at, added_at, c_at, epilogue},
                                   adds, stream));
  }
  return true;
}

void product_cuda(Tensor& c, const Tensor& a, const Tensor& b, const ProductOptions& options) {
  ProductOptions rest = options;
  if (c.numel() == 0) return;
  if (a.size(-1) == 0) {
    if (!rest.accumulate) c.fill_(0);
    if (rest.bias.defined()) add_into(c, rest.bias);
    if (rest.addend.defined()) add_into(c, rest.addend);
    return;
  }
  // cuBLASLt has no epilogue for f64 biases.
  if (c.dtype() == f64 && rest.bias.defined()) {
    const Tensor bias = std::exchange(rest.bias, Tensor());
    product_cuda(c, a, b, rest);
    add_into(c, bias);
    return;
  }
  if (c.strides()[-1] != 1 && c.size(-1) != 1) {
    Tensor result = rest.accumulate ? c.contiguous() : Tensor::empty(c.shape(), c.dtype(), c.device());
    product_cuda(result, a, b, rest);
    c.copy_(result);
    return;
  }
  if (rest.addend.defined() && rest.addend.strides() != c.strides()) {
    c.copy_(rest.addend);
    rest.addend = Tensor();
    rest.accumulate = true;
  }
  const cudaStream_t stream = stream_of(c);
  const Tensor left = usable(a) ? a : a.contiguous(), right = usable(b) ? b : b.contiguous();
  gpu::dispatch_floating(c.dtype(), "product", [&](auto zero) {
    using T = decltype(zero);
    Epilogue epilogue;
    if (rest.bias.defined()) epilogue = {CUBLASLT_EPILOGUE_BIAS, read<T>(rest.bias)};
    multiply<T>(c, left, right, rest.addend, rest.accumulate, epilogue, stream);
  });
}

// Whether GELU can be an epilogue of c [M, N] = a [M, K] b [K, N]: of 16 bits, as its tanh is an
// approximation.
bool gelu_fits(const Tensor& c, const Tensor& a, const Tensor& b) {
  return (c.dtype() == f16 || c.dtype() == bf16) && c.numel() > 0 && a.size(-1) > 0 && c.size(-1) % 8 == 0 &&
         usable(a) && usable(b);
}

void product_gelu_cuda(Tensor& hidden, Tensor& input, const Tensor& a, const Tensor& b, const Tensor& bias,
                       bool& done) {
  if (!gelu_fits(hidden, a, b)) return;
  gpu::dispatch_floating(hidden.dtype(), "product", [&](auto zero) {
    using T = decltype(zero);
    if (bias.defined() && !is_aligned(read<T>(bias))) return;
    const Epilogue epilogue{bias.defined() ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX,
                            bias.defined() ? read<T>(bias) : nullptr, write<T>(input)};
    done = multiply<T>(hidden, a, b, Tensor(), false, epilogue, stream_of(hidden));
  });
}

const CudaKernel<void(Tensor&, const Tensor&, const Tensor&, const ProductOptions&)> product_kernel{
    "product", product_cuda};
const CudaKernel<void(Tensor&, Tensor&, const Tensor&, const Tensor&, const Tensor&, bool&)> gelu_kernel{
    "product.gelu", product_gelu_cuda};

}  // namespace

}  // namespace torus
