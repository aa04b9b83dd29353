// Matrix products on CUDA, by cuBLASLt.
#include <cublasLt.h>

#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <span>
#include <utility>

#include "torus/core/cuda.h"
#include "torus/core/gemm.h"
#include "torus/core/memory.h"

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
  cublasLtEpilogue_t epilogue;
  bool adds, tf32;
  int device;

  bool operator<(const Plan& o) const {
    return std::tie(dtype, m, n, k, batches, a, b, d, epilogue, adds, tf32, device) <
           std::tie(o.dtype, o.m, o.n, o.k, o.batches, o.a, o.b, o.d, o.epilogue, o.adds, o.tf32, o.device);
  }
};

// The descriptors of a plan and the algorithm chosen for it, if there is one; kept for good.
struct Prepared {
  bool possible = false;
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
  cublasLtMatmulAlgo_t algorithm = {};
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

// The algorithm is the one that cuBLASLt expects to be the fastest.
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
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(cublas.handle, made.operation, made.a, made.b,
                                                               made.d, made.d, preference, 1, &found, &count);
  cublasLtMatmulPreferenceDestroy(preference);
  made.possible = status == CUBLAS_STATUS_SUCCESS && count > 0;
  if (made.possible) made.algorithm = found.algo;
  return made;
}

const Prepared& prepared(const Plan& plan, const Library& cublas, const Epilogue& epilogue) {
  static std::mutex mutex;
  static auto* plans = new std::map<Plan, Prepared>;
  std::lock_guard lock(mutex);
  const auto found = plans->find(plan);
  return found != plans->end() ? found->second
                               : plans->emplace(plan, prepare(plan, cublas, epilogue)).first->second;
}

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
  const compute<T> alpha = 1, beta = adds ? 1 : 0;

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
              .epilogue = epilogue.kind,
              .adds = adds,
              .tf32 = c.dtype() == f32 && tf32_allowed(),
              .device = c.device().index};
    plan.d.alignment = std::min(plan.d.alignment, operand(c, added_at, step[0]).alignment);
    const Prepared& ready = prepared(plan, cublas, epilogue);
    if (!ready.possible && epilogue.optional()) return false;
    check(ready.possible, Error::Kind::Device, "[product] cuBLASLt has no algorithm for [", m, ", ", k,
          "] times [", k, ", ", n, "] of ", c.dtype());
    // The prepared one is shared between threads.
    cublasLtMatmulDescOpaque_t operation;
    std::memcpy(&operation, ready.operation, sizeof operation);
    set_operands(operation, epilogue);
    check_cublas(cublasLtMatmul(cublas.handle, &operation, &alpha, b_at, ready.a, a_at, ready.b, &beta,
                                added_at, ready.d, c_at, ready.d, &ready.algorithm, cublas.workspace,
                                workspace_bytes, stream));
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
