// Independent tasks on the caller's thread pool. Tasks are handed out one by one in their order, so the
// longest go first and threads finish together; a task's result never depends on the thread that runs it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace flash::cpu {

// The torch layer's thread pool and the scratch memory it allocated: the engine itself allocates nothing.
struct Threads {
    using Body = void (*)(int64_t begin, int64_t end, void* context);
    void (*parallel_for)(int64_t begin, int64_t end, int64_t grain, Body body, void* context);
    int64_t count;
    char* scratch;  // count * scratch_bytes, aligned to 64
    size_t scratch_bytes;
};

template <class Task>
inline __attribute__((always_inline)) void for_each_task(const Threads& threads, int64_t tasks,
                                                         const Task& task) {
    struct Context {
        const Threads& threads;
        const Task& task;
        int64_t tasks;
        std::atomic<int64_t> next{0};
    } context{threads, task, tasks};
    const auto body = [](int64_t begin, int64_t end, void* raw) {
        Context& context = *static_cast<Context*>(raw);
        for (int64_t worker = begin; worker < end; ++worker) {
            char* scratch = context.threads.scratch + size_t(worker) * context.threads.scratch_bytes;
            for (int64_t i; (i = context.next.fetch_add(1, std::memory_order_relaxed)) < context.tasks;)
                context.task(i, scratch);
        }
    };
    threads.parallel_for(0, threads.count < tasks ? threads.count : tasks, 1, body, &context);
}

// Hands out pieces of a thread's scratch memory; with base nullptr it only counts the bytes.
class Carver {
  public:
    explicit Carver(char* base) : base_(base) {}

    template <class T>
    inline __attribute__((always_inline)) T* take(int64_t count) {
        T* piece = reinterpret_cast<T*>(base_ + used_);
        used_ += (size_t(count) * sizeof(T) + 63) / 64 * 64;
        return piece;
    }
    size_t used() const { return used_; }

  private:
    char* base_;
    size_t used_ = 0;
};

}  // namespace flash::cpu
