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
    if (is_supported(isa)) {
      EXPECT_LE(isa, active_isa());
    }
  }
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
