#include "torus/core/kernel.h"

#include <gtest/gtest.h>

#include "core/expect_error.h"

namespace torus {
namespace {

const Kernel<void(int&)> set_one{"test.set_one", [](int& value) { value = 1; }};
const Kernel<void(int&)> set_two{"test.set_two", [](int& value) { value = 2; }};
const CudaKernel<void(int&)> cuda_set_two{"test.set_two", [](int& value) { value = 22; }};
const Kernel<void(int&)> mismatched{"test.mismatched", [](int&) {}};
const CudaKernel<void(int)> cuda_mismatched{"test.mismatched", [](int) {}};

TEST(Kernel, FindsTheKernelOfTheDevice) {
  int value = 0;
  set_one(cpu, value);
  EXPECT_EQ(value, 1);
  set_two({DeviceKind::cuda, 0}, value);
  EXPECT_EQ(value, 22);
  EXPECT_ERROR(set_one({DeviceKind::cuda, 0}, value), Device,
               "[test.set_one] has no cuda kernel in this build");
  EXPECT_ERROR(mismatched({DeviceKind::cuda, 0}, value), Device, "another signature");
  EXPECT_ERROR((CudaKernel<void(int&)>{"test.set_two", [](int&) {}}), Device, "registered twice");
}

}  // namespace
}  // namespace torus
