// EXPECT_ERROR(statement, kind, text): the statement throws torus::Error of the kind, one line that holds the
// text.
#pragma once

#include <gtest/gtest.h>

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
