// Random numbers for tests.
#pragma once

#include <cstdint>

namespace maxmoe {

// The generator SplitMix64. std::mt19937 fills a state of 2.5 KB first, which takes longer than the numbers of a small
// matrix.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t bits() {
    uint64_t mixed = state_ += 0x9E3779B97F4A7C15;
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB;
    return mixed ^ mixed >> 31;
  }
  // Returns a uniform number in [begin, end).
  double uniform(double begin, double end) {
    return begin + (end - begin) * static_cast<double>(bits() >> 11) * 0x1p-53;
  }
  // Returns a uniform integer in [0, size).
  uint64_t below(uint64_t size) { return bits() % size; }

 private:
  uint64_t state_;
};

}  // namespace maxmoe
