// Hopper's own instructions, thinly wrapped: tensor maps and bulk copies (TMA), barriers in shared memory,
// and products of warp groups (wgmma). PTX ISA 8.0, sm_90a. For kernels; not installed.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include "torus/core/cuda.h"
#include "torus/ops/attention/backend.h"
#include "torus/ops/attention/cuda_mma.h"
#include "torus/ops/attention/grouped_map.h"

namespace torus::gpu::hopper {

using mma::add_release;
using mma::columns_below;
using mma::copy_16_async;
using mma::copy_4_async;
using mma::infinity;
using mma::load_acquire;
using mma::log2_e;
using mma::pack;
using mma::quad_max;
using mma::quad_sum;
using mma::shared_address;
using Rows = mma::Operand;

/// Whether compute-sanitizer should be able to follow the kernels.
#ifdef TORUS_SANITIZE
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif
/// Lanes of a warp that say for it that it is done with what others will write again, after all have met:
/// one. racecheck does not follow __syncwarp to a barrier in shared memory, and would report every such
/// write: for it all lanes speak.
inline constexpr int voices = sanitized ? 32 : 1;
__device__ inline bool speaks_for_warp() { return static_cast<int>(threadIdx.x) % 32 < voices; }

/// The same value in all lanes, which the compiler cannot know: products under a condition that lanes might
/// differ on are run one by one.
__device__ inline int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// ---------------------------------------------------------------------------------------------- barriers

/// A barrier in shared memory: `arrivals` and the bytes that are expected complete a phase.
struct Barrier {
  uint64_t word;

  __device__ void init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals));
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  __device__ void arrive_and_expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
                 "r"(bytes)
                 : "memory");
  }
  /// Arrives once all cp.async that the thread issued before are done.
  __device__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(this))
                 : "memory");
  }
  /// Waits until the phase of this parity is complete; a fresh barrier is in phase 0.
  __device__ void wait(uint32_t parity) {
    asm volatile(
        "{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra "
        "again;}" ::"r"(shared_address(this)),
        "r"(parity)
        : "memory");
  }
  /// Whether it is.
  __device__ bool complete(uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{.reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, "
        "done;}"
        : "=r"(done)
        : "r"(shared_address(this)), "r"(parity)
        : "memory");
    return done;
  }
};
/// After barriers were made, by the thread that made them.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}

/// A barrier of the hardware among `threads`, without and with waiting. 0 is that of __syncthreads.
__device__ inline void arrive_at(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void sync_at(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// A place in a ring of `size` stages, and the parity of its barriers there.
template <int size>
struct Stage {
  int index = 0;
  uint32_t parity = 0;
  __device__ void next() {
    if (++index == size) index = 0, parity ^= 1;
  }
};

/// The same in several rings that go on together, in fewer registers: sizes are powers of 2.
struct Places {
  uint32_t passed = 0;
  template <int size>
  __device__ int index() const {
    static_assert((size & (size - 1)) == 0);
    return static_cast<int>(passed % size);
  }
  template <int size>
  __device__ uint32_t parity() const {
    return passed / size % 2;
  }
  __device__ void next() { ++passed; }
};

// ------------------------------------------------------------------------------------------------ copies

/// What ordinary stores wrote to shared memory becomes visible to bulk copies and products.
__device__ inline void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// A box of a tensor [B, H, N, D], from (b, h, row, column) on; zeros beyond its ends.
__device__ inline void copy_box(void* to, const CUtensorMap& map, int32_t column, int32_t row, int32_t h,
                                int32_t b, Barrier& done) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&done)), "r"(column), "r"(row), "r"(h), "r"(b)
      : "memory");
}
/// A multiple of 16 bytes between multiples of 16 bytes.
__device__ inline void copy_bulk(void* to, const void* from, uint32_t bytes, Barrier& done) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&done))
      : "memory");
}
/// Adds f32 of shared memory to global memory, or stores them there, without waiting; then waits until all
/// such shared memory has been read, or until all results but the last `pending` are in global memory.
__device__ inline void add_bulk(float* to, const void* from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ inline void store_bulk(float* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ inline void wait_for_bulk_reads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
template <int pending>
__device__ inline void wait_for_bulk() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

/// Four 8 x 8 matrices of 16 bits: lanes 8 i ... 8 i + 7 give the addresses of the rows of matrix i.
__device__ inline void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

/// More registers for the warps of a warp group that multiply, fewer for those that copy.
template <int registers>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// ---------------------------------------------------------------------------------------------- products

/// Of an operand: whether rows in memory run along k or along m (or n).
enum class Major { k, mn };

/// Operands in shared memory are panels of 64 columns: rows of 128 bytes whose chunks of 16 are swizzled over
/// 8 rows. `group`: bytes from 64 columns to the next 64 (of an operand whose rows run along m or n).
__device__ inline uint64_t descriptor(const void* panel, uint32_t group = 16) {
  return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | static_cast<uint64_t>(group >> 4) << 16 |
         (shared_address(panel) & 0x3ffff) >> 4;
}
/// The same operand, `bytes` further.
__device__ inline uint64_t further(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

/// Before products whose registers were written, and after a few of them.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits for all but the last `pending` groups of products.
template <int pending>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
/// Keeps the compiler from moving uses of an accumulator over a wait.
template <int n>
__device__ inline void hold(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Accumulators: element 4 j + 2 h + c of a thread is row 16 (warp) + lane / 4 + 8 h, column 8 j + 2 (lane %
// 4)
// + c.

/// d (+)= a b, of 64 x 64: both in shared memory.
template <class T, Major a_major, Major b_major>
__device__ inline void multiply(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, %35, %36;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(accumulate), "n"(a_major == Major::k ? 0 : 1),
          "n"(b_major == Major::k ? 0 : 1));
  else
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, "
        "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, %35, %36;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(accumulate), "n"(a_major == Major::k ? 0 : 1),
          "n"(b_major == Major::k ? 0 : 1));
}

/// d (+)= a b, of 64 x 64: a in registers, as an accumulator packs into.
template <class T, Major b_major>
__device__ inline void multiply(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),
          "n"(b_major == Major::k ? 0 : 1));
  else
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, "
        "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),
          "n"(b_major == Major::k ? 0 : 1));
}

/// d (+)= a b, of 64 x 128: both in shared memory.
template <class T, Major a_major, Major b_major>
__device__ inline void multiply(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %66, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
        "%59, %60, %61, %62, %63}, %64, %65, p, 1, 1, %67, %68;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
          "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(accumulate), "n"(a_major == Major::k ? 0 : 1),
          "n"(b_major == Major::k ? 0 : 1));
  else
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %66, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, "
        "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, "
        "%41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, "
        "%58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, %67, %68;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
          "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(accumulate), "n"(a_major == Major::k ? 0 : 1),
          "n"(b_major == Major::k ? 0 : 1));
}

/// d (+)= a b, of 64 x 128: a in registers, as an accumulator packs into.
template <class T, Major b_major>
__device__ inline void multiply(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>)
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %69, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
        "%59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
          "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),
          "n"(b_major == Major::k ? 0 : 1));
  else
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %69, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, "
        "%7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, "
        "%41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, "
        "%58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
          "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),
          "n"(b_major == Major::k ? 0 : 1));
}

// -------------------------------------------------------------------------------------------- map, tiles

/// The tensor map of x [B, H, N, D]: boxes of 64 columns by `rows`.
CUtensorMap tensor_map(const Tensor& x, int rows);

/// What a tile of owners sees of a block of `width` 64s, in bits: whether any pair; whether not all; whether
/// the block is the group's last; and of each 64, whether nothing.
struct Sight {
  static constexpr int32_t visits = 1, masked = 2, last = 4, nothing = 8;
};

/// A block that is visited, as the warps that copy it tell those that multiply.
template <int tiles, int width>
struct BlockNote {
  int32_t sight[tiles];
  int32_t ids[tiles][width];  // see GroupedSide
  int32_t first, count;       // others: `first` is a token, if they are not listed
  int32_t member;
  const uint32_t* fragments;  // of its map

  __device__ bool is_last() const { return sight[0] & Sight::last; }
  __device__ static int32_t sight_of(const int32_t (&ids)[width], int32_t count, bool last) {
    int32_t sight = (count < 64 * width ? Sight::masked : 0) | (last ? Sight::last : 0);
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const bool none = ids[i] == torus::detail::GroupedSide::none;
      sight |= (none ? Sight::nothing << i : Sight::visits) |
               (ids[i] == torus::detail::GroupedSide::full ? 0 : Sight::masked);
    }
    return sight;
  }
};

/// Writes an accumulator's 64 x 64 * panels columns, times a factor a row: row i of the warp group goes to
/// that of `token(i)`, or nowhere where that is negative. 16 bytes a lane: lanes of a quad first trade
/// theirs.
template <class T, int n, class Token>
__device__ inline void store_rows(const float (&d)[n], const float (&factor)[2], T* head, int64_t stride,
                                  int first_column, int columns, const Token& token) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int part = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t to = token(16 * warp + lane / 4 + 8 * half);
#pragma unroll
    for (int j = 0; j < n / 4; j += 4) {
      uint32_t word[4];  // of columns 8 (j + i) + 2 part
#pragma unroll
      for (int i = 0; i < 4; ++i)
        word[i] =
            pack<T>(d[4 * (j + i) + 2 * half] * factor[half], d[4 * (j + i) + 2 * half + 1] * factor[half]);
        // A transposition of 4 x 4 words over the quad: the lane gets all of columns 8 (j + part) and on.
#pragma unroll
      for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (!(i & step)) {
            const bool upper = part & step;
            const uint32_t given = upper ? word[i] : word[i + step];
            const uint32_t got = __shfl_xor_sync(0xffffffffu, given, step);
            if (upper)
              word[i] = got;
            else
              word[i + step] = got;
          }
      const int column = first_column + 8 * (j + part);
      if (to >= 0 && column < columns)
        *reinterpret_cast<uint4*>(head + to * stride + column) =
            make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
}

/// `otherwise` in place of elements of an accumulator whose bit in `allowed`, a word of each 64 columns, is
/// not set.
template <int n>
__device__ inline void keep_allowed(float (&d)[n], const uint32_t (&allowed)[n / 32], float otherwise) {
#pragma unroll
  for (int i = 0; i < n; ++i)
    if (!(allowed[i / 32] >> i % 32 & 1)) d[i] = otherwise;
}

// ------------------------------------------------------------------------- copies of rows by index, 16 bytes
// a lane

/// Of a warp group that copies rows by index, the first warp reads maps ahead of the others.
inline constexpr int copying_warps = 3;

/// Starts to fill panels of `rows` rows of these tokens (-1: zeros), by the copying warps; `stride` is less
/// than 2^31 bytes.
template <class T, int width, int rows>
__device__ inline void gather(char* to, const T* head, int64_t stride, int columns, const int32_t* tokens) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 - 1;
  const int chunk = lane % 8, first = lane / 8;  // eight lanes a row
  const auto bytes = static_cast<uint32_t>(stride * 2);
  const char* const base = reinterpret_cast<const char*>(head + chunk * 8);
  const uint32_t place = shared_address(to);
  const uint32_t half[2] = {place + first * 128 + (chunk ^ first) * 16,
                            place + (first + 4) * 128 + (chunk ^ (first + 4)) * 16};
  // Eight rows at a time, whose swizzle is always the same; all tokens are read before they are used.
  constexpr int turns = (rows / 8 + copying_warps - 1) / copying_warps;
  const auto there = [&](int turn) {
    return 8 * copying_warps * (turn + 1) <= rows || 8 * (warp + copying_warps * turn) < rows;
  };
  int32_t token[turns][2];
#pragma unroll
  for (int turn = 0; turn < turns; ++turn)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (there(turn)) token[turn][h] = tokens[8 * (warp + copying_warps * turn) + 4 * h + first];
#pragma unroll
  for (int turn = 0; turn < turns; ++turn)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!there(turn)) break;
      const char* const from = base + uint64_t{static_cast<uint32_t>(token[turn][h])} * bytes;
#pragma unroll
      for (int panel = 0; panel < width / 64; ++panel)
        copy_16_async(half[h] + (warp + copying_warps * turn) * 1024 + panel * rows * 128, from + panel * 128,
                      token[turn][h] >= 0 && panel * 64 + chunk * 8 < columns);
    }
}

/// What a block of threads that copies by index goes through: rings that one warp writes, ahead of the warps
/// that copy and of those that multiply, so that none of these waits for maps. A visit is a block of others.
template <int tiles, int width, int groups, int visits>
struct Agenda {
  static constexpr int others = 64 * width, words = 3 + tiles * width;
  Barrier group_full[groups], group_empty[groups], visit_full[visits], visit_empty[visits];
  int32_t group[groups], matrix[groups];  // group -1: no more
  int32_t owners[groups][64 * tiles];     // their tokens; -1: none
  BlockNote<tiles, width> notes[visits];
  int32_t tokens[visits][others];  // -1: none

  /// By one thread; each warp that copies or multiplies arrives once at what is empty again.
  __device__ void init() {
    constexpr uint32_t readers = (copying_warps + 4 * tiles) * voices;
    // Copies of all lanes, and once what they stored themselves.
    for (int i = 0; i < groups; ++i) group_full[i].init(32 + 1), group_empty[i].init(readers);
    for (int i = 0; i < visits; ++i) visit_full[i].init(32 + 1), visit_empty[i].init(readers);
  }

  /// By one warp. Matrices are `heads` a batch, each of which goes through `members` query heads.
  __device__ void write(const GroupedTable& maps, const mma::Schedule& schedule, int32_t* taken,
                        uint32_t heads, int32_t members) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const auto of_lane = [](int32_t value, int from) { return __shfl_sync(0xffffffffu, value, from); };
    Stage<groups> own;
    Stage<visits> visit;
    for (int64_t index = blockIdx.x;; own.next()) {
      int64_t g = -1, m = 0;
      if (index < schedule.tiles * schedule.matrices) schedule.find(index, g, m);
      const int64_t b = static_cast<uint32_t>(m) / heads, first_head = (m - b * heads) * members;
      group_empty[own.index].wait(own.parity ^ 1);
      if (lane == 0) group[own.index] = static_cast<int32_t>(g), matrix[own.index] = static_cast<int32_t>(m);
      if (g >= 0) {
        const int32_t* const from = maps.of(b, first_head).owners + g * (64 * tiles);
#pragma unroll
        for (int i = lane; i < 64 * tiles; i += 32)
          copy_4_async(shared_address(&owners[own.index][i]), from + i, true);
      }
      group_full[own.index].arrive_after_copies();
      __syncwarp();
      if (lane == 0) group_full[own.index].arrive();
      if (g < 0) return;
      index =
          taken ? int64_t{gridDim.x} + of_lane(lane == 0 ? atomicAdd(taken, 1) : 0, 0) : index + gridDim.x;
      for (int32_t member = 0; member < members; ++member) {
        const GroupedView& map = maps.of(b, first_head + member);
        const int32_t end = map.first[g + 1];
        int32_t entry = map.first[g];
        const auto read = [&](int32_t which) -> int32_t {
          return which < end && lane < words ? map.entries[int64_t{which} * words + lane] : 0;
        };
        for (int32_t word = read(entry), next_word; entry < end; ++entry, word = next_word) {
          next_word = read(entry + 1);
          const int32_t first = of_lane(word, 0), blocks = of_lane(word, 1), left = of_lane(word, 2);
          for (int32_t n = 0; n < max(blocks, 1); ++n, visit.next()) {
            const bool ends = n >= blocks - 1;
            const int32_t count = ends ? left : others;
            visit_empty[visit.index].wait(visit.parity ^ 1);
            auto& note = notes[visit.index];
            const bool last = ends && entry + 1 == end && member == members - 1;
            if (lane == 0) note.count = count, note.member = member, note.fragments = map.fragments;
            int32_t ids[width];
#pragma unroll
            for (int i = 0; i < width; ++i) ids[i] = of_lane(word, 3 + min(lane, tiles - 1) * width + i);
            if (lane < tiles) note.sight[lane] = note.sight_of(ids, count, last);
            if (lane >= 3 && lane < words) note.ids[(lane - 3) / width][(lane - 3) % width] = word;
            int32_t* const to = tokens[visit.index];
#pragma unroll
            for (int i = lane; i < others; i += 32)
              if (blocks == 0 && i < count)
                copy_4_async(shared_address(to + i), map.lists + first + i, true);
              else
                to[i] = i < count ? first + n * others + i : -1;
            visit_full[visit.index].arrive_after_copies();
            __syncwarp();
            if (lane == 0) visit_full[visit.index].arrive();
          }
        }
      }
    }
  }
};

/// Writes the note of a block, by one thread.
template <int tiles, int width>
__device__ inline void write_note(BlockNote<tiles, width>& note, const int32_t* entry, bool ends, bool last) {
#pragma unroll
  for (int i = 0; i < tiles * width; ++i) note.ids[i / width][i % width] = entry[3 + i];
  note.count = ends ? entry[2] : 64 * width;
#pragma unroll
  for (int i = 0; i < tiles; ++i) note.sight[i] = note.sight_of(note.ids[i], note.count, last);
}

/// What a warp group's tile sees of a block.
template <int width>
struct Allowed {
  uint32_t word[width];  // of each 64 others: bit 4 j + 2 h + c, as accumulators
  int seen[width];  // the 64 that a product reads in place of the i-th, of which a tile of owners may see
                    // nothing: then its factors are 0, and what they multiply must be finite, as is what the
                    // tile sees
  bool visits, masked, last;

  template <int tiles>
  __device__ Allowed(const BlockNote<tiles, width>& note, int tile) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int32_t sight = uniform(note.sight[tile]);
    visits = sight & Sight::visits, masked = sight & Sight::masked, last = sight & Sight::last;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      seen[i] = width == 2 && (sight & Sight::nothing << i) ? 1 - i : i;
      word[i] = ~0u;
      if (!masked) continue;
      const int32_t id = note.ids[tile][i];
      if (id >= 0)
        word[i] = __ldg(note.fragments + int64_t{128} * id + thread);
      else if (sight & Sight::nothing << i)
        word[i] = 0;
      else if (note.count < 64 * (i + 1))
        word[i] = columns_below(note.count - 64 * i, thread % 32);
    }
  }
};

// -------------------------------------------------------------------------------------- on the host

/// How many blocks of threads a kernel runs that goes from tile to tile: one a multiprocessor.
unsigned blocks_at_once(const mma::Schedule& schedule, Device device);

std::string refusal(const torus::detail::AttentionProblem& problem);
void run_forward(const torus::detail::AttentionProblem& problem, Tensor& out, Tensor& lse);
void run_backward(const torus::detail::AttentionProblem& problem,
                  torus::detail::AttentionGradients& gradients);
/// By two passes: dK and dV by keys, then dQ by queries; any map and width, and any score up to width
/// 128. `d_out` and the gradients have rows of whole 16 bytes; gradients that are undefined are not made.
void run_two_pass_backward(const torus::detail::AttentionProblem& problem,
                           torus::detail::AttentionGradients& gradients, const Tensor& d_out);

}  // namespace torus::gpu::hopper
