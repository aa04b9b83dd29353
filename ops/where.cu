#include "torus/core/cuda.h"

namespace torus {

namespace {

using namespace gpu;

// The flags of the elements of a Pack<T>.
template <class T>
struct alignas(Pack<T>::count) Flags {
  uint8_t at[Pack<T>::count];
};

// All contiguous, but a and b have a single element where they are `fixed`. y may be b.
template <class T>
__global__ void choose_packs(T* y, const uint8_t* condition, const T* a, const T* b, bool a_fixed,
                             bool b_fixed, int64_t count) {
  constexpr int width = Pack<T>::count;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x * width;
  const T one_a = a[0], one_b = b[0];
  for (int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * width; i < count; i += stride) {
    if (i + width <= count) {
      const Flags<T> flags = *reinterpret_cast<const Flags<T>*>(condition + i);
      Pack<T> yes, no, to;
      if (!a_fixed) yes = *reinterpret_cast<const Pack<T>*>(a + i);
      if (!b_fixed) no = *reinterpret_cast<const Pack<T>*>(b + i);
#pragma unroll
      for (int j = 0; j < width; ++j)
        to.at[j] = flags.at[j] ? (a_fixed ? one_a : yes.at[j]) : (b_fixed ? one_b : no.at[j]);
      *reinterpret_cast<Pack<T>*>(y + i) = to;
    } else {
      for (int64_t j = i; j < count; ++j)
        y[j] = condition[j] ? (a_fixed ? one_a : a[j]) : (b_fixed ? one_b : b[j]);
    }
  }
}

template <class T>
__global__ void choose_places(T* y, const uint8_t* condition, const T* a, const T* b,
                              const __grid_constant__ Strided<4> walk) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < walk.count; i += stride) {
    int64_t at[4];
    walk.offsets(i, at);
    y[at[0]] = condition[at[1]] ? a[at[2]] : b[at[3]];
  }
}

bool is_fixed(const Tensor& x) {
  for (int axis = 0; axis < x.dim(); ++axis)
    if (x.strides()[axis] != 0 && x.size(axis) != 1) return false;
  return true;
}

void where(Tensor& y, const Tensor& condition, const Tensor& a, const Tensor& b) {
  if (y.numel() == 0) return;
  const cudaStream_t stream = stream_of(y);
  gpu::dispatch(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using B = bits<T>;
    const auto* const which = reinterpret_cast<const uint8_t*>(read<bool>(condition));
    const auto *const yes = reinterpret_cast<const B*>(read<T>(a)), *const no = reinterpret_cast<const B*>(
                                                                        read<T>(b));
    auto* const to = reinterpret_cast<B*>(write<T>(y));
    const bool a_fixed = is_fixed(a), b_fixed = is_fixed(b);
    const bool packs = y.is_contiguous() && condition.is_contiguous() &&
                       (a_fixed || (a.is_contiguous() && is_aligned(yes))) &&
                       (b_fixed || (b.is_contiguous() && is_aligned(no))) && is_aligned(to) &&
                       reinterpret_cast<uintptr_t>(which) % Pack<B>::count == 0;
    constexpr int threads = 256;
    if (packs)
      choose_packs<<<blocks_for(y.numel(), threads * Pack<B>::count), threads, 0, stream>>>(
          to, which, yes, no, a_fixed, b_fixed, y.numel());
    else
      choose_places<<<blocks_for(y.numel(), threads), threads, 0, stream>>>(
          to, which, yes, no,
          Strided<4>(y.shape(), {y.strides(), condition.strides(), a.strides(), b.strides()}));
    check_launch("where");
  });
}

const CudaKernel<void(Tensor&, const Tensor&, const Tensor&, const Tensor&)> where_kernel{"where", where};

}  // namespace

}  // namespace torus
