// A team of threads that goes through a list of stages together.
//
// Starting an OpenMP region costs 30 to 60 us where idle threads sleep (OMP_WAIT_POLICY=PASSIVE, which processes that
// share cores need), more than most stages of a small model take. So a whole step is one region, and between its
// stages the team meets at a barrier of its own (0.3 us): it spins for a moment and then sleeps, which gives the core
// to whoever holds up the others. Work is claimed piece by piece, so that a thread that lost its core delays the team
// by one piece at most.
#pragma once

#include <ATen/Parallel.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace cpd {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  struct Shared {
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<uint32_t> phase{0};
  };

  Team(Shared& shared, int id, int size) : shared_(shared), id_(id), size_(size) {}

  int id() const { return id_; }

  // Calls body(i) once for every i below n, on whichever thread is free, and returns on all threads when all is done.
  template <typename Body>
  void each(int64_t n, Body&& body) {
    if (size_ == 1) {
      for (int64_t i = 0; i < n; ++i) body(i);
      return;
    }
    for (int64_t i; (i = shared_.next.fetch_add(1, std::memory_order_relaxed)) < n;) body(i);
    meet();
  }

  // The same in a few contiguous pieces, body(begin, end), for work too small to be claimed one by one.
  template <typename Body>
  void ranges(int64_t n, Body&& body) {
    int64_t pieces = size_ == 1 ? 1 : std::min<int64_t>(n, 4 * size_);
    each(pieces, [&](int64_t i) { body(n * i / pieces, n * (i + 1) / pieces); });
  }

 private:
  void meet() {
    constexpr int kSpins = 2000;
    uint32_t phase = shared_.phase.load(std::memory_order_relaxed);
    if (shared_.arrived.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      shared_.arrived.store(0, std::memory_order_relaxed);
      shared_.next.store(0, std::memory_order_relaxed);
      shared_.phase.store(phase + 1, std::memory_order_release);
      shared_.phase.notify_all();
      return;
    }
    for (int i = 0; i < kSpins; ++i) {
      if (shared_.phase.load(std::memory_order_acquire) != phase) return;
      relax();
    }
    shared_.phase.wait(phase, std::memory_order_acquire);
  }

  Shared& shared_;
  int id_, size_;
};

inline int team_size(bool parallel) { return parallel ? at::get_num_threads() : 1; }

// Runs body(team) on every thread of a team, as large as torch's thread count where `parallel`, else this thread alone:
// for work not worth the start of one. Never more than `team_size(parallel)` threads. `body` must not throw.
template <typename Body>
void run_team(bool parallel, Body&& body) {
  Team::Shared shared;
  const int most = team_size(parallel);
  if (most == 1) {
    Team team(shared, 0, 1);
    body(team);
    return;
  }
#pragma omp parallel
  {
    Team team(shared, omp_get_thread_num(), std::min(most, omp_get_num_threads()));
    if (team.id() < most) body(team);
  }
}

}  // namespace cpd
