// EXPECT_ERROR(statement, kind, text): the statement throws torus::Error of the kind, one line that holds the
// text.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "torus/core/error.h"

#define EXPECT_ERROR(statement, expected_kind, text)                                    \
  try {                                                                                 \
    statement;                                                                          \
    ADD_FAILURE() << "expected an error with: " << (text);                              \
  } catch (const torus::Error& error) {                                                 \
    EXPECT_EQ(error.kind(), torus::Error::Kind::expected_kind) << error.what();         \
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what(); \
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what(); \
  }

namespace torus {

/// What f throws, or "no error".
inline std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace torus
