// The functions of CUDA that kernels call, on the fibers of the emulator. Names and arguments are CUDA's.
#pragma once

#include "cuda/emulator.h"

inline void __syncthreads() {
  using namespace maxmoe::cuda;
  emulator::block->fiber().wait = emulator::Wait::barrier;
  emulator::yield();
}

inline void __syncwarp(uint32_t mask = ~0U) {
  using namespace maxmoe::cuda;
  emulator::collective(&emulator::kind_of<struct SyncWarp>, mask, 0, [](const auto&) { return 0; });
}

template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int lanes) {
  using namespace maxmoe::cuda;
  return emulator::collective(&emulator::kind_of<struct ShuffleXor>, mask, value, [&](const auto& of) {
    return of(emulator::block->lane() ^ static_cast<unsigned>(lanes));
  });
}

template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned distance) {
  using namespace maxmoe::cuda;
  return emulator::collective(&emulator::kind_of<struct ShuffleUp>, mask, value, [&](const auto& of) {
    const unsigned lane = emulator::block->lane();
    return of(lane < distance ? lane : lane - distance);
  });
}

template <class T>
T __shfl_sync(uint32_t mask, T value, int lane) {
  using namespace maxmoe::cuda;
  return emulator::collective(&emulator::kind_of<struct Shuffle>, mask, value,
                              [&](const auto& of) { return of(static_cast<unsigned>(lane)); });
}

inline uint32_t __ballot_sync(uint32_t mask, bool predicate) {
  using namespace maxmoe::cuda;
  return emulator::collective(&emulator::kind_of<struct Ballot>, mask, predicate, [&](const auto& of) {
    uint32_t bits = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
      if ((mask >> lane & 1U) != 0 && of(lane)) bits |= 1U << lane;
    }
    return bits;
  });
}

template <class T>
uint32_t __match_any_sync(uint32_t mask, T value) {
  using namespace maxmoe::cuda;
  return emulator::collective(&emulator::kind_of<struct MatchAny>, mask, value, [&](const auto& of) {
    uint32_t bits = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
      if ((mask >> lane & 1U) != 0 && of(lane) == value) bits |= 1U << lane;
    }
    return bits;
  });
}

inline int __popc(uint32_t bits) {
  return std::popcount(bits);
}

namespace maxmoe::cuda {

inline void check_alignment(const void* address, const char* message) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) emulator::fail(message);
}

// See device.h for the next functions. The approximations have the errors of the device, times `approximation_error`.
inline float approximate(double exact, double units) {
  constexpr double kUnit = std::numeric_limits<float>::epsilon();
  return static_cast<float>(exact * (1 + emulator::approximation_error * units * kUnit));
}
inline float approximate_exp(float x) {
  return approximate(std::exp(x), 2 + std::fabs(1.173 * x));
}
inline float approximate_inverse(float x) {
  return approximate(1 / x, 1);
}

template <bool kTransposed>
void load_matrices(uint32_t (&registers)[4], const void* row) {
  check_alignment(row, "ldmatrix of an address that is not aligned");
  emulator::collective(&emulator::kind_of<std::bool_constant<kTransposed>>, ~0U, row, [&](const auto& of) {
    const unsigned lane = emulator::block->lane();
    for (unsigned m = 0; m < 4; ++m) {
      uint16_t pair[2];
      for (unsigned i = 0; i < 2; ++i) {
        const unsigned line = kTransposed ? lane % 4 * 2 + i : lane / 4;
        const unsigned column = kTransposed ? lane / 4 : lane % 4 * 2 + i;
        std::memcpy(&pair[i], static_cast<const uint16_t*>(of(m * 8 + line)) + column, 2);
      }
      std::memcpy(&registers[m], pair, 4);
    }
    return 0;
  });
}

// The layouts of the PTX manual for mma.m16n8k16: lane 4 i + j has rows i and i + 8 of A, and column i of B.
template <class T>
void multiply_tile(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Fragments {
    float a[4][2], b[2][2];
  };
  const auto number = [](uint32_t word, unsigned half) {
    return widen(T{static_cast<uint16_t>(half != 0 ? word >> 16 : word)});
  };
  Fragments own;
  for (unsigned i = 0; i < 2; ++i) {
    for (unsigned m = 0; m < 4; ++m) own.a[m][i] = number(a[m], i);
    for (unsigned half = 0; half < 2; ++half) own.b[half][i] = number(b[half], i);
  }
  emulator::collective(&emulator::kind_of<T>, ~0U, own, [&](const auto& of) {
    const unsigned lane = emulator::block->lane();
    for (unsigned half = 0; half < 2; ++half) {
      for (unsigned pair = 0; pair < 4; ++pair) {
        const Fragments& left = of(lane / 4 * 4 + pair);
        for (unsigned column = 0; column < 2; ++column) {
          const Fragments& right = of((lane % 4 * 2 + column) * 4 + pair);
          for (unsigned i = 0; i < 2; ++i) {
            sums[column] += left.a[half * 2][i] * right.b[half][i];
            sums[2 + column] += left.a[half * 2 + 1][i] * right.b[half][i];
          }
        }
      }
    }
    return 0;
  });
}

inline void copy_async(void* to, const void* from, int bytes) {
  check_alignment(to, "cp.async to an address that is not aligned");
  check_alignment(from, "cp.async of an address that is not aligned");
  const emulator::Copy copy{to, from, bytes};
  if (!emulator::schedule.copies_late) copy.run();
  emulator::Fiber& fiber = emulator::block->fiber();
  fiber.copies.push_back(copy);
  ++fiber.num_open;
}

inline void commit_copies() {
  emulator::Fiber& fiber = emulator::block->fiber();
  fiber.commits.push_back(std::exchange(fiber.num_open, 0));
}

template <int kPending>
void wait_for_copies() {
  auto& copies = emulator::block->fiber().copies;
  auto& commits = emulator::block->fiber().commits;
  while (commits.size() > kPending) {
    const auto end = copies.begin() + static_cast<ptrdiff_t>(commits.front());
    if (emulator::schedule.copies_late) std::for_each(copies.begin(), end, [](const auto& copy) { copy.run(); });
    copies.erase(copies.begin(), end);
    commits.erase(commits.begin());
  }
}

}  // namespace maxmoe::cuda
