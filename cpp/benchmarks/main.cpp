// The command line of the benchmarks: maxmoe_kernels_benchmarks [--filter REGEX] [--rounds N] [--threads N]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <thread>

#include "harness.h"

namespace maxmoe::benchmarks {
namespace {

// Minimum time for which a contender is called without a break.
constexpr double kSecondsPerTurn = 1e-3;

std::vector<void (*)(Session&)>& benchmarks() {
  static std::vector<void (*)(Session&)> all;
  return all;
}

// Seconds that `calls` calls take in total.
double turn(const Contender& contender, int64_t calls) {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < calls; ++i) contender.call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Number of calls per turn, chosen so that reading the clock takes a negligible share. The first call, with page faults
// and cold caches, is not timed.
int64_t calls_per_turn(const Contender& contender) {
  contender.call();
  int64_t calls = 1;
  while (turn(contender, calls) < kSecondsPerTurn) calls *= 2;
  return calls;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

struct Options {
  std::string filter;
  int rounds = 20;
  int threads = static_cast<int>(std::thread::hardware_concurrency());
};

int positive(const std::string& option, const std::string& text) {
  size_t end = 0;
  const int value = text.empty() || text[0] < '0' || text[0] > '9' ? 0 : std::stoi(text, &end);
  if (value < 1 || end != text.size()) {
    throw std::invalid_argument(option + " must be a positive number, got '" + text + "'");
  }
  return value;
}

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; i += 2) {
    const std::string option = arguments[i];
    const std::string value = i + 1 < count ? arguments[i + 1] : "";
    if (option == "--filter") {
      options.filter = value;
    } else if (option == "--rounds") {
      options.rounds = positive(option, value);
    } else if (option == "--threads") {
      options.threads = positive(option, value);
    } else {
      throw std::invalid_argument(
          "options are --filter REGEX (of kernel, shape and dtype), --rounds N and --threads N");
    }
  }
  return options;
}

}  // namespace

Registration::Registration(void (*benchmark)(Session&)) {
  benchmarks().push_back(benchmark);
}

Session::Session(const std::string& filter, int rounds, int num_threads)
    : filter_(filter), rounds_(rounds), threads_(num_threads) {
  std::printf("%s, %d threads, best and median of %d rounds\n\n", name(active_isa()), num_threads, rounds);
  std::printf("%-20s  %-37s  %-8s  %-24s  %10s  %10s  %15s  %12s\n", "kernel", "shape", "dtype", "contender", "best ms",
              "median ms", "at best", "bound / best");
}

bool Session::is_selected(const Case& c) const {
  return std::regex_search(c.kernel + " " + c.shape + " " + c.dtype, filter_);
}

void Session::time(const Case& c, Work work, const std::vector<Contender>& contenders) {
  ++num_cases_;
  std::vector<int64_t> calls;
  for (const Contender& contender : contenders) calls.push_back(calls_per_turn(contender));
  // Each round starts with another contender, so that no contender always follows the same other one.
  std::vector<std::vector<double>> seconds(contenders.size());
  for (size_t round = 0; round < static_cast<size_t>(rounds_); ++round) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      const size_t index = (round + i) % contenders.size();
      seconds[index].push_back(turn(contenders[index], calls[index]) / static_cast<double>(calls[index]));
    }
  }
  const double bound = *std::min_element(seconds[1].begin(), seconds[1].end());
  for (size_t i = 0; i < contenders.size(); ++i) {
    const double best = *std::min_element(seconds[i].begin(), seconds[i].end());
    std::printf("%-20s  %-37s  %-8s  %-24s  %10.5f  %10.5f  %7.1f %-7s  %12.2f\n", c.kernel.c_str(), c.shape.c_str(),
                c.dtype.c_str(), contenders[i].name.c_str(), best * 1e3, median(seconds[i]) * 1e3,
                work.amount / best / 1e9, work.unit, bound / best);
  }
  std::fflush(stdout);
}

}  // namespace maxmoe::benchmarks

int main(int count, char** arguments) {
  using namespace maxmoe::benchmarks;  // NOLINT(google-build-using-namespace)
  try {
    const Options options = parse(count, arguments);
    Session session(options.filter, options.rounds, options.threads);
    for (const auto benchmark : benchmarks()) benchmark(session);
    if (session.num_cases() == 0) throw std::invalid_argument("no case matches --filter '" + options.filter + "'");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
