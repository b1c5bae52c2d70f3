// A team of threads that runs the stages of a job: a leader, which is the calling thread, and helpers.
//
// Cores are shared with other processes, so any thread may lose its core for milliseconds. Therefore a team never waits
// for a thread, only for pieces of work: the leader opens a stage, all threads claim pieces of it, and the leader then
// waits for the pieces that helpers are still computing. A helper that comes late finds fewer pieces or none; the
// leader may then already have returned, so a job owns all its data. (OpenMP waits for every thread at the start and
// end of each region. If idle threads sleep, OMP_WAIT_POLICY=PASSIVE, that costs 30 to 60 us, more than most stages of
// a small model, and milliseconds if another process has the core.)
//
// A waiting thread spins for a moment and then sleeps, which frees its core.
#pragma once

#include <ATen/Parallel.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace cpd {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns the first value of `word` other than `old`.
inline uint32_t await_change(const std::atomic<uint32_t>& word, uint32_t old) {
  constexpr int kSpins = 1000;  // 20 to 50 us
  for (int i = 0; i < kSpins; ++i) {
    const uint32_t now = word.load(std::memory_order_acquire);
    if (now != old) return now;
    relax();
  }
  word.wait(old, std::memory_order_acquire);
  return word.load(std::memory_order_acquire);
}

class Team;

// Stages are numbered from 1. Helpers work only on the leader's stage, and skip earlier ones.
struct Job {
  static constexpr uint32_t kOver = UINT32_MAX;

  explicit Job(int size) : size(size) {}
  virtual ~Job() = default;
  virtual void run(Team& team) = 0;

  const int size;                               // most threads
  alignas(64) std::atomic<uint64_t> next{0};    // upper half: stage; lower half: its next unclaimed piece
  alignas(64) std::atomic<uint32_t> helped{0};  // pieces of the stage that helpers have completed
  alignas(64) std::atomic<uint32_t> stage{0};   // the leader's stage
};

// One thread's view of a job.
class Team {
 public:
  Team() = default;  // one thread
  Team(Job& job, int id) : job_(&job), id_(id), size_(job.size) {}

  int id() const { return id_; }
  int size() const { return size_; }

  // Calls body(i) once for every i below n. The leader returns when all calls are complete, a helper when no piece is
  // left to claim. All threads must call it in the same order and with the same n.
  template <typename Body>
  void each(int64_t n, Body&& body) {
    if (size_ == 1) {
      for (int64_t i = 0; i < n; ++i) body(i);
    } else if (id_ == 0) {
      lead(n, body);
    } else {
      help(n, body);
    }
  }

  // The same in a few contiguous ranges, body(begin, end), for work too small to be claimed one by one.
  template <typename Body>
  void ranges(int64_t n, Body&& body) {
    const int64_t pieces = size_ == 1 ? 1 : std::min<int64_t>(n, 4 * size_);
    each(pieces, [&](int64_t i) { body(n * i / pieces, n * (i + 1) / pieces); });
  }

 private:
  template <typename Body>
  void lead(int64_t n, Body& body) {
    ++stage_;
    job_->helped.store(0, std::memory_order_relaxed);
    job_->next.store(uint64_t(stage_) << 32, std::memory_order_release);
    job_->stage.store(stage_, std::memory_order_release);
    job_->stage.notify_all();
    const uint32_t by_helpers = n - claim_all(n, body);
    for (uint32_t done = job_->helped.load(std::memory_order_acquire); done != by_helpers;)
      done = await_change(job_->helped, done);
  }

  template <typename Body>
  void help(int64_t n, Body& body) {
    ++stage_;
    uint32_t stage = job_->stage.load(std::memory_order_acquire);
    while (stage < stage_) stage = await_change(job_->stage, stage);
    if (stage > stage_) return;
    claim_all(n, [&](int64_t i) {
      body(i);
      job_->helped.fetch_add(1, std::memory_order_release);
      job_->helped.notify_one();
    });
  }

  // Claims pieces of this thread's stage until none is left. Returns their number.
  template <typename Body>
  int64_t claim_all(int64_t n, Body&& body) {
    int64_t claimed = 0;
    uint64_t next = job_->next.load(std::memory_order_acquire);
    while (next >> 32 == stage_ && int64_t(next & UINT32_MAX) < n)
      if (job_->next.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) {
        body(int64_t(next & UINT32_MAX));
        ++claimed;
        next = job_->next.load(std::memory_order_acquire);
      }
    return claimed;
  }

  Job* job_ = nullptr;
  int id_ = 0, size_ = 1;
  uint32_t stage_ = 0;
};

// Sleeping helpers of one thread that calls kernels. They end when that thread does.
class Helpers {
 public:
  explicit Helpers(int count) {
    // Helpers block all signals: the program's own threads handle them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int id = 1; id <= count; ++id) std::thread(serve, mailbox_, id).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  ~Helpers() { post(nullptr, true); }

  void lead(const std::shared_ptr<Job>& job) {
    post(job, false);
    Team team(*job, 0);
    job->run(team);
    job->stage.store(Job::kOver, std::memory_order_release);
    job->stage.notify_all();
    const std::lock_guard lock(mailbox_->mutex);
    mailbox_->job.reset();
  }

 private:
  // Passes a job from the leader to its helpers.
  struct Mailbox {
    std::mutex mutex;
    std::shared_ptr<Job> job;
    bool closed = false;
    std::atomic<uint32_t> posts{0};
  };

  void post(const std::shared_ptr<Job>& job, bool closed) {
    {
      const std::lock_guard lock(mailbox_->mutex);
      mailbox_->job = job;
      mailbox_->closed = closed;
      mailbox_->posts.fetch_add(1, std::memory_order_release);
    }
    mailbox_->posts.notify_all();
  }

  static void serve(std::shared_ptr<Mailbox> mailbox, int id) {
    for (uint32_t seen = 0;;) {
      mailbox->posts.wait(seen, std::memory_order_acquire);
      std::shared_ptr<Job> job;
      {
        const std::lock_guard lock(mailbox->mutex);
        if (mailbox->closed) return;
        seen = mailbox->posts.load(std::memory_order_relaxed);
        job = mailbox->job;
      }
      if (!job) continue;
      Team team(*job, id);
      job->run(team);
    }
  }

  std::shared_ptr<Mailbox> mailbox_ = std::make_shared<Mailbox>();
};

// This thread's team with `count` helpers. A thread alternates between a few counts: all cores, or a lane's share.
inline Helpers& helpers_of_this_thread(int count) {
  thread_local std::map<int, Helpers> teams;
  return teams.try_emplace(count, count).first->second;
}

// Threads for a call: torch's count, or one for work too small to wake others.
inline int team_size(bool parallel) { return parallel ? at::get_num_threads() : 1; }

// Runs body(team) on this thread and, if `parallel`, on any helpers that join. `body` must not throw. A helper may
// still be inside `body`, without claims, after this returns: `body` must own everything that it reads between stages.
template <typename Body>
void run_team(bool parallel, Body body) {
  const int size = team_size(parallel);
  if (size == 1) {
    Team team;
    body(team);
    return;
  }
  struct BodyJob final : Job {
    BodyJob(int size, Body&& body) : Job(size), body(std::move(body)) {}
    void run(Team& team) override { body(team); }
    Body body;
  };
  helpers_of_this_thread(size - 1).lead(std::make_shared<BodyJob>(size, std::move(body)));
}

}  // namespace cpd
