// The six tile instructions in plain code, for tests on processors without AMX. Results have the bits of the processor.
//
// What the emulation does not see: the permission of the system, the state that a signal handler or a switch of threads
// saves, a compiler that moves a store past a tile load, and the speed. It throws where the processor would raise an
// exception: tiles that are not configured, and sizes that do not fit.
#pragma once

#include <cstdint>

namespace maxmoe::emulated_tiles {

// Sets the sizes of the tiles of this thread, and zeroes them. `configuration` has the layout of ldtilecfg.
void configure(const void* configuration);
void release();
void load(int tile, const void* address, int64_t stride);
void store(int tile, void* address, int64_t stride);
void zero(int tile);
// TDPBF16PS: c += a * b.
void multiply(int c, int a, int b);

// The arithmetic of TDPBF16PS: sum + a * b and a + b, each rounded once; subnormal inputs and results are zeros.
float multiply_add(float sum, float a, float b);
float add(float a, float b);

}  // namespace maxmoe::emulated_tiles
