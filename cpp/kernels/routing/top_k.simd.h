// Selection of the largest keys of a row.
#pragma once

#include <limits>

#include "kernels/isa/vector.simd.h"
#include "kernels/routing/route.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// The indices of the `count` largest of `keys`, by insertion into a sorted list. The largest is first; among equal keys
// the lowest index is first, if ranges are added in ascending order. Most keys fail the first comparison, so that its
// branch is predicted.
template <class T>
class TopK {
 public:
  TopK(const T* keys, int64_t count, int64_t* selected) : keys_(keys), count_(count), selected_(selected) {}

  // Adds the keys [begin, end). A key that enters a full list replaces the last one.
  void add_range(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (filled_ == count_ && !(keys_[i] > keys_[selected_[count_ - 1]])) continue;
      int64_t place = filled_ < count_ ? filled_++ : count_ - 1;
      for (; place > 0 && keys_[i] > keys_[selected_[place - 1]]; --place) selected_[place] = selected_[place - 1];
      selected_[place] = i;
    }
  }

 private:
  const T* keys_;
  int64_t count_;
  int64_t* selected_;
  int64_t filled_ = 0;
};

template <class T>
MAXMOE_INLINE Vector<T> lanewise_max(Vector<T> a, Vector<T> b) {
  return a < b ? b : a;
}

template <class T>
MAXMOE_INLINE Vector<T> lanewise_min(Vector<T> a, Vector<T> b) {
  return b < a ? b : a;
}

// Rotates the lanes: vector[(lane + distance) % kLanes].
template <class T>
MAXMOE_INLINE Vector<T> rotated(Vector<T> vector, int distance) {
  Vector<T> result;
  for (int lane = 0; lane < kLanes<T>; ++lane) result[lane] = vector[(lane + distance) % kLanes<T>];
  return result;
}

// The largest biased score of a group, or the sum of its two largest. Computed in vectors, without branches: the order
// of the scores is random, so that branches would be mispredicted.
template <class T>
T score_group(GroupScore group_score, const T* biased, int64_t group_size) {
  const Vector<T> lowest = Vector<T>{} - std::numeric_limits<T>::infinity();
  Vector<T> best = lowest;
  Vector<T> second = lowest;
  const auto add = [&](Vector<T> values) {
    // The smaller one of the new score and the best so far may be the second best.
    second = lanewise_max<T>(second, lanewise_min<T>(values, best));
    best = lanewise_max<T>(best, values);
  };
  int64_t i = 0;
  for (; i + kLanes<T> <= group_size; i += kLanes<T>) add(load_vector(biased + i));
  // The scores that fill no vector. The other lanes are -infinity and change nothing.
  Vector<T> rest = lowest;
  for (int64_t lane = 0; i + lane < group_size; ++lane) rest[lane] = biased[i + lane];
  add(rest);
  // Each step merges the two best scores of a lane with the two best of the lane `distance` further on, which has read
  // other scores. After the last step every lane holds the two best of the group. 4 steps are the most, for 16 lanes.
#pragma GCC unroll 4
  for (int distance = kLanes<T> / 2; distance > 0; distance /= 2) {
    const Vector<T> other = rotated<T>(best, distance);
    second = lanewise_max<T>(lanewise_min<T>(best, other), lanewise_max<T>(second, rotated<T>(second, distance)));
    best = lanewise_max<T>(best, other);
  }
  return group_score == GroupScore::top2 && group_size > 1 ? best[0] + second[0] : best[0];
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
