// Runs CUDA kernels on the CPU, for tests. Each thread of a block is a fiber; the blocks run one after the other, on
// the same fibers.
//
// Between two synchronizations a fiber runs alone, in an order that the schedule permutes: a missing barrier gives
// another result in another order. An asynchronous copy happens at once, or as late as the waits allow: a missing wait
// then reads NaN, because shared memory is filled with NaN before each block. Global memory is plain memory, so that
// the address sanitizer checks every access. These are errors: a barrier that not all threads of a block reach, lanes
// of a warp in different collectives, a collective with a lane that has ended or is not in the mask, copies that are
// not committed, and addresses that are not aligned.
//
// The emulator cannot find: races between blocks or through global memory, since blocks run one after the other; errors
// of the memory model (missing fences); wrong PTX text, and a wrong layout of fragments if emulator and kernel agree on
// it; shared memory or registers beyond the limits of a device; bank conflicts, uncoalesced accesses, spills and every
// other loss of speed. Functions round as on the host: on a device exp, erf and others may differ in the last bits, and
// a * b + c is contracted to one rounding. Kernels must therefore also be compiled by nvcc and run once on a device.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1) : x(x_size), y(y_size), z(z_size) {}
};
inline thread_local constinit dim3 threadIdx, blockIdx, blockDim, gridDim;  // of the running fiber

namespace maxmoe::cuda::emulator {

enum class Order { forward, backward, random };

// The order of threads and blocks, and other choices of a device.
struct Schedule {
  Order order = Order::forward;
  unsigned seed = 1;
  bool copies_late = true;           // asynchronous copies happen in the wait, not at once
  unsigned max_blocks = 0x7fffffff;  // blocks per grid
  unsigned multiprocessors = 2;
};
inline thread_local Schedule schedule;

// What the operators ask a device for.
struct Device {
  int compute_capability = 0;
  bool is_capturing = false;
};
inline thread_local Device device;

// The launches of an operator, and the bytes that its kernels moved by load() and store() (device.h).
struct Traffic {
  int64_t launches = 0;
  int64_t loaded = 0;
  int64_t stored = 0;
};
inline thread_local std::map<std::string, Traffic> traffic_of;  // by operator
inline thread_local Traffic outside_of_kernels;                 // of blocks that tests run by themselves
inline thread_local Traffic* traffic = &outside_of_kernels;     // of the running kernel

// From -1 to 1: the error of approximate functions as a part of the largest one of a device.
inline thread_local double approximation_error = 0.0;

struct Copy {
  void* to;
  const void* from;
  int bytes;
  void run() const {
    std::memset(to, 0, 16);
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
};

enum class Wait { none, barrier, lanes };

constexpr size_t kStackBytes = 128 << 10;

// The position at which a fiber or the scheduler continues, written by __builtin_setjmp. swapcontext makes a system
// call. With the address sanitizer, longjmp and every call of a [[noreturn]] function make system calls, too, so that
// tests took ten times as long: the functions that switch are therefore not instrumented.
using Position = void* [5];
#define MAXMOE_SWITCHES __attribute__((no_sanitize("address")))

// What a fiber keeps from block to block.
struct Stack {
  std::unique_ptr<unsigned char[]> memory = std::make_unique_for_overwrite<unsigned char[]>(kStackBytes);
  Position position;
  void* sanitizer = nullptr;  // the state of the address sanitizer for a fiber that waits
  bool is_started = false;
};

// A fiber in a block.
struct Fiber {
  Stack* stack = nullptr;
  bool is_done = false;
  Wait wait = Wait::none;
  dim3 index;
  std::vector<Copy> copies;     // copies without a wait so far, oldest first
  std::vector<size_t> commits;  // numbers of copies in the committed groups, oldest first
  size_t num_open = 0;          // copies that have not been committed
};

// A collective operation of the lanes of a warp. Its kind is the address of a static variable of the function.
struct Warp {
  uint32_t arrived = 0, left = 0, mask = 0, exited = 0;  // one bit per lane
  const void* kind = nullptr;
  alignas(16) unsigned char values[32][64];
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<unsigned char> shared;
  std::function<void()> body;
  std::string failure;
  Position scheduler;
  void* sanitizer = nullptr;
  const void* scheduler_stack = nullptr;
  size_t scheduler_bytes = 0;
  size_t current = 0;
  Fiber& fiber() { return fibers[current]; }
  Warp& warp() { return warps[current / 32]; }
  unsigned lane() const { return static_cast<unsigned>(current % 32); }
};
inline thread_local Block* block = nullptr;

inline thread_local std::vector<Stack> stacks;  // fiber i has stack i

constexpr unsigned char kPoison = 0xff;           // a NaN in every type
constexpr size_t kGuardBytes = size_t{32} << 10;  // after the shared memory

// 128-byte aligned.
inline unsigned char* shared_memory() {
  const auto address = reinterpret_cast<uintptr_t>(block->shared.data());
  return block->shared.data() + (128 - address % 128) % 128;
}

// Tells the address sanitizer which stack is used next, and which one is used now.
inline void before_switch([[maybe_unused]] void** own, [[maybe_unused]] const void* stack,
                          [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(own, stack, bytes);
#endif
}
inline void after_switch([[maybe_unused]] void* own, [[maybe_unused]] const void** last_stack,
                         [[maybe_unused]] size_t* last_bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(own, last_stack, last_bytes);
#endif
}

[[noreturn]] MAXMOE_SWITCHES inline void leave_fiber(void** own) {
  before_switch(own, block->scheduler_stack, block->scheduler_bytes);
  __builtin_longjmp(block->scheduler, 1);
}

// Ends the kernel: `launch` throws std::runtime_error. No object of the caller is destroyed.
[[noreturn]] inline void fail_assertion(const char* message) {
  block->failure = message;
  leave_fiber(nullptr);
}
[[noreturn]] inline void fail(const char* message) {
  block->failure = std::string(message) + " (block " + std::to_string(blockIdx.x) + ", thread " +
                   std::to_string(block->current) + ")";
  leave_fiber(nullptr);
}

// Switches to the scheduler.
MAXMOE_SWITCHES inline void yield() {
  Stack& stack = *block->fiber().stack;
  if (__builtin_setjmp(stack.position) == 0) leave_fiber(&stack.sanitizer);
  // Not `stack`: a larger block may have moved all of them.
  after_switch(block->fiber().stack->sanitizer, &block->scheduler_stack, &block->scheduler_bytes);
}

[[noreturn]] inline void run_fiber() {
  after_switch(nullptr, &block->scheduler_stack, &block->scheduler_bytes);
  for (;;) {
    block->body();
    Fiber& fiber = block->fiber();
    if (fiber.num_open > 0) fail("a thread ends with copies that it has not committed");
    fiber.is_done = true;
    block->warp().exited |= 1U << block->lane();
    yield();  // until a later block has a thread of this number
  }
}

// This function does not return. If it were instrumented, the sanitizer would keep its stack frame.
MAXMOE_SWITCHES inline void start_fiber(Stack& stack) {
  stack.is_started = true;
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = stack.memory.get();
  start.uc_stack.ss_size = kStackBytes;
  start.uc_link = nullptr;
  makecontext(&start, run_fiber, 0);
  setcontext(&start);
}

[[noreturn]] MAXMOE_SWITCHES inline void enter_fiber(Stack& stack) {
  before_switch(&block->sanitizer, stack.memory.get(), kStackBytes);
  if (!stack.is_started) start_fiber(stack);
  __builtin_longjmp(stack.position, 1);
}

// Runs a fiber until it waits.
MAXMOE_SWITCHES inline void resume(size_t thread) {
  block->current = thread;
  threadIdx = block->fiber().index;
  if (__builtin_setjmp(block->scheduler) == 0) enter_fiber(*block->fiber().stack);
  after_switch(block->sanitizer, nullptr, nullptr);
}

inline bool can_run(size_t thread) {
  const Fiber& fiber = block->fibers[thread];
  const Warp& warp = block->warps[thread / 32];
  if (fiber.is_done || fiber.wait == Wait::barrier) return false;
  return fiber.wait == Wait::none || warp.arrived == warp.mask;
}

inline std::vector<size_t> initial_order(size_t count) {
  std::vector<size_t> order(count);
  for (size_t i = 0; i < count; ++i) order[i] = schedule.order == Order::backward ? count - 1 - i : i;
  return order;
}

// Runs the threads of a block until all have ended. Each warp goes as far as it can before the next one begins.
inline void run_block() {
  const size_t count = block->fibers.size();
  std::minstd_rand random(schedule.seed + blockIdx.x);
  std::vector<size_t> warps = initial_order(block->warps.size());
  std::vector<size_t> lanes = initial_order(32);
  const auto permute = [&](std::vector<size_t>& order) {
    if (schedule.order == Order::random) std::shuffle(order.begin(), order.end(), random);
  };
  const auto run_warp = [&](size_t warp) {
    for (bool has_run = true; has_run;) {
      permute(lanes);
      has_run = false;
      for (const size_t lane : lanes) {
        const size_t thread = warp * 32 + lane;
        if (thread >= count || !can_run(thread)) continue;
        resume(thread);
        if (!block->failure.empty()) throw std::runtime_error(block->failure);
        has_run = true;
      }
    }
  };
  for (;;) {
    permute(warps);
    for (const size_t warp : warps) run_warp(warp);
    size_t waiting = 0;
    size_t done = 0;
    for (const Fiber& fiber : block->fibers) {
      done += fiber.is_done;
      waiting += !fiber.is_done && fiber.wait == Wait::barrier;
    }
    if (done == count) return;
    if (waiting + done < count) throw std::runtime_error("lanes wait for lanes that do something else");
    if (done > 0) throw std::runtime_error("a barrier that not all threads of the block reach");
    for (Fiber& fiber : block->fibers) fiber.wait = Wait::none;
  }
}

// All lanes of `mask` give a value; each lane then calls read(of), where of(lane) is the value of a lane.
template <class T, class Read>
auto collective(const void* kind, uint32_t mask, const T& value, const Read& read) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(Warp::values[0]) && alignof(T) <= 16);
  Warp& warp = block->warp();
  Fiber& fiber = block->fiber();
  const uint32_t bit = 1U << block->lane();
  if ((mask & bit) == 0) fail("a collective whose mask lacks the calling lane");
  while (warp.left != 0) {  // lanes are still in the last collective
    fiber.wait = Wait::none;
    yield();
  }
  if (warp.arrived == 0) {
    warp.mask = mask;
    warp.kind = kind;
  }
  if (warp.mask != mask || warp.kind != kind) fail("lanes of a warp in different collectives");
  if ((warp.exited & mask) != 0) fail("a collective with a lane that has ended");
  std::memcpy(warp.values[block->lane()], &value, sizeof(T));
  warp.arrived |= bit;
  fiber.wait = Wait::lanes;
  if (warp.arrived != mask) yield();
  fiber.wait = Wait::none;
  const auto of = [&](unsigned lane) -> const T& {
    return *std::launder(reinterpret_cast<const T*>(warp.values[lane % 32]));
  };
  auto result = read(of);
  warp.left |= bit;
  if (warp.left == mask) warp.left = warp.arrived = 0;
  return result;
}

// Sets the running block, and resets it. After an error it removes the fibers, since they wait in the middle of a
// kernel.
class Running {
 public:
  explicit Running(Block& running) { block = &running; }
  ~Running() {
    if (std::uncaught_exceptions() > 0) stacks.clear();
    block = nullptr;
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
};

template <class Kernel>
void run_grid(dim3 grid, dim3 threads, size_t shared_bytes, const Kernel& kernel) {
  Block running;
  const Running guard(running);
  running.body = kernel;
  const unsigned count = threads.x * threads.y * threads.z;
  if (stacks.size() < count) stacks.resize(count);
  gridDim = grid;
  blockDim = threads;
  std::vector<size_t> blocks = initial_order(size_t{grid.x} * grid.y * grid.z);
  if (schedule.order == Order::random) {
    std::shuffle(blocks.begin(), blocks.end(), std::minstd_rand(schedule.seed));
  }
  for (const size_t i : blocks) {
    blockIdx = dim3(static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                    static_cast<unsigned>(i / grid.x / grid.y));
    running.shared.assign(128 + shared_bytes + kGuardBytes, kPoison);
    running.warps.assign((count + 31) / 32, {});
    running.fibers.assign(count, {});
    for (unsigned t = 0; t < count; ++t) {
      running.fibers[t].stack = &stacks[t];
      running.fibers[t].index = dim3(t % threads.x, t / threads.x % threads.y, t / threads.x / threads.y);
    }
    run_block();
    const unsigned char* const end = shared_memory() + shared_bytes;
    const size_t rest = static_cast<size_t>(running.shared.data() + running.shared.size() - end) - 1;
    if (end[0] != kPoison || std::memcmp(end, end + 1, rest) != 0) {
      throw std::runtime_error("a write past the end of the shared memory");
    }
  }
}

// The address that identifies a collective.
template <class Tag>
inline const char kind_of = 0;

}  // namespace maxmoe::cuda::emulator
