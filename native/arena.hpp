// Where objects lie in the memory arena: an allocator of offsets.
//
// Offsets are drawn from a space several times as large as the arena's capacity, and only what is used of it takes memory.
// So an object finds room whenever fewer than `capacity` bytes are taken, however the rest is scattered: it goes to fresh
// offsets, and as much idle memory elsewhere goes back to the system. Nothing that was handed out ever moves.
//
// A place is chosen so that it covers as much idle memory as can be had (fresh memory costs page faults), then by best fit.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace retain {

using Range = std::pair<std::uint64_t, std::uint64_t>;  // offset, size

struct Taken {
    std::uint64_t offset;
    std::vector<Range> idle;  // memory that must go back to the system before the new bytes are written
};

class Arena {
  public:
    static constexpr std::uint64_t kPage = 4096;

    // Both are rounded down to pages; `span` is at least `capacity`.
    Arena(std::uint64_t capacity, std::uint64_t span);
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    std::optional<Taken> take(std::uint64_t size);
    std::uint64_t give(std::uint64_t offset);
    std::optional<std::uint64_t> fresh(std::uint64_t size);

    std::uint64_t capacity() const { return capacity_; }
    std::uint64_t span() const { return span_; }
    std::uint64_t used() const { return used_; }
    std::uint64_t idle() const { return idle_bytes_; }

  private:
    // Disjoint ranges, joined where they touch, by offset and by size.
    class Ranges {
      public:
        std::map<std::uint64_t, std::uint64_t> by_offset;
        std::set<std::pair<std::uint64_t, std::uint64_t>> by_size;  // size, offset

        void add(std::uint64_t offset, std::uint64_t size);
        std::uint64_t remove(std::uint64_t offset, std::uint64_t size);
        std::uint64_t covered(std::uint64_t offset, std::uint64_t size) const;
        Range around(std::uint64_t offset) const;

      private:
        void insert(std::uint64_t offset, std::uint64_t size);
        void erase(std::map<std::uint64_t, std::uint64_t>::iterator range);
        std::map<std::uint64_t, std::uint64_t>::const_iterator first_reaching(std::uint64_t offset) const;
    };

    std::optional<std::uint64_t> choose(std::uint64_t size) const;
    std::vector<Range> give_back();

    std::uint64_t capacity_;
    std::uint64_t span_;
    std::uint64_t used_ = 0;
    std::uint64_t idle_bytes_ = 0;
    Ranges free_;
    Ranges idle_;  // the parts of free space that still hold memory
    std::unordered_map<std::uint64_t, std::uint64_t> taken_;
};

}  // namespace retain
