// Tests of the choice of an instruction set.
#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels/isa/isa.h"

namespace maxmoe {
namespace {

TEST(Isa, BaselineIsAlwaysSupported) {
  EXPECT_TRUE(is_supported(Isa::baseline));
}

TEST(Isa, ActiveIsTheOneOfTheEnvironment) {
  const char* requested = std::getenv("MAXMOE_ISA");
  EXPECT_TRUE(is_supported(active_isa()));
  if (requested != nullptr) {
    EXPECT_STREQ(name(active_isa()), requested);
  }
}

TEST(Isa, TheBestOneIsTheDefault) {
  if (std::getenv("MAXMOE_ISA") != nullptr) GTEST_SKIP() << "MAXMOE_ISA is set";
  for (const Isa isa : all_isas) {
    if (is_supported(isa) && isa != Isa::amx_emulated) {
      EXPECT_LE(isa, active_isa());
    }
  }
}

// What has no variant for matrix units runs with vectors of the same processor.
TEST(Isa, VectorKernelsHaveNoMatrixUnits) {
  EXPECT_TRUE(is_supported(vector_isa()));
  EXPECT_LE(vector_isa(), Isa::avx512bf16);
  EXPECT_EQ(vector_isa() == active_isa(), active_isa() <= Isa::avx512bf16);
}

TEST(Isa, NamesAreParsedBack) {
  for (const Isa isa : all_isas) {
    if (is_supported(isa)) {
      EXPECT_EQ(parse_isa(name(isa)), isa);
    }
  }
}

TEST(Isa, ErrorsListTheSupportedNames) {
  for (const char* text : {"", "sse", "AVX2", "avx1024"}) {
    try {
      parse_isa(text);
      FAIL() << "accepted '" << text << "'";
    } catch (const std::invalid_argument& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("MAXMOE_ISA"), std::string::npos) << message;
      EXPECT_NE(message.find("baseline"), std::string::npos) << message;
      EXPECT_NE(message.find(std::string("'") + text + "'"), std::string::npos) << message;
    }
  }
  for (const Isa isa : all_isas) {
    if (!is_supported(isa)) {
      EXPECT_THROW(parse_isa(name(isa)), std::invalid_argument);
    }
  }
}

}  // namespace
}  // namespace maxmoe
