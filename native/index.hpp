// The index of a tier: which objects it holds, how they hang together, and which of them goes next.
//
// About 145 bytes a record at a million records, everything included, and 40 more where the policy remembers what is gone. Records live in fixed chunks and the hash tables
// grow one bucket an insertion, so that no call ever pays for moving or rehashing everything.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "chunked.hpp"
#include "forecast.hpp"

namespace retain {

using Slot = std::uint32_t;
inline constexpr Slot kNone = 0xFFFFFFFFu;
inline constexpr std::size_t kKeyBytes = 32;

struct Key {
    std::array<std::uint64_t, 4> words;

    static Key from(const char* bytes) {
        Key key;
        std::memcpy(key.words.data(), bytes, kKeyBytes);
        return key;
    }
    const char* data() const { return reinterpret_cast<const char*>(words.data()); }
    bool operator==(const Key& other) const { return words == other.words; }
    bool operator!=(const Key& other) const { return words != other.words; }
};

struct Record {
    Key key;
    Key parent;
    std::uint64_t size;
    std::uint64_t offset;
    std::uint32_t form;
    std::uint32_t space;
    std::uint32_t refs;
    std::uint32_t hits;
    Slot key_next;      // chain of the key table; of a free record: the next free one
    Slot group_next;    // chain of the parent table, of the first record of a group alone
    Slot sibling_next;  // the records of one parent, most recently used first
    Slot sibling_prev;
    bool live;
    bool pinned;
    std::uint8_t uses;  // as `hits`, but from before an eviction too, up to 255
    std::uint8_t kind;  // of the policy: the heap that it belongs in
};

using Records = Chunked<Record>;

// A hash table of chains threaded through the records (linear hashing, Litwin 1980). Seeded for each process, since
// keys may come from files that somebody else wrote.
class Chains {
  public:
    Chains(Slot Record::*next, Key Record::*key);

    Slot first(const Records& records, const Key& key) const;
    Slot next(const Records& records, Slot slot) const;
    void insert(Records& records, Slot slot);
    void remove(Records& records, Slot slot);
    void replace(Records& records, Slot old, Slot by);
    std::size_t nbytes() const { return heads_.nbytes(); }

  private:
    std::uint64_t hash(const Key& key) const;
    std::size_t bucket(std::uint64_t hash) const;
    Slot& link_to(Records& records, Slot slot);
    void split(Records& records);

    Slot Record::*next_;
    Key Record::*key_;
    std::array<std::uint64_t, 4> seed_;
    Chunked<Slot> heads_;
    std::size_t low_;
    std::size_t entries_ = 0;
};

enum class Policy { kLru, kLruLeaf, kReuseLeaf };

struct Totals {
    std::uint64_t count = 0;
    std::uint64_t bytes = 0;
};

// All methods that take a slot throw std::out_of_range when no record is there; those that take several change nothing then.
class Index {
  public:
    explicit Index(const std::string& policy);
    Index(const Index&) = delete;
    Index& operator=(const Index&) = delete;

    Slot insert(const Key& key, std::uint32_t form, std::uint32_t space, const Key& parent, std::uint64_t size,
                std::uint64_t offset);
    void remove(Slot slot);

    Slot find(const Key& key, std::uint32_t form) const;
    std::vector<Slot> same_key(const Key& key) const;
    std::vector<Slot> children(const Key& parent, std::size_t limit) const;
    void lookup(const char* keys, std::size_t count, const std::vector<std::uint32_t>& forms, Slot* out) const;
    std::vector<Slot> slots(std::optional<std::uint32_t> space, std::optional<std::uint32_t> form) const;

    void touch(const Slot* slots, std::size_t count);
    void acquire(const Slot* slots, std::size_t count);
    void release(const Slot* slots, std::size_t count);
    bool pin(Slot slot);
    bool unpin(Slot slot);
    void set_parent(Slot slot, const Key& parent);
    void set_space(Slot slot, std::uint32_t space);
    void set_offset(Slot slot, std::uint64_t offset);

    Slot victim() const;

    const Record& record(Slot slot) const;
    std::uint64_t tick(Slot slot) const;
    Totals totals() const { return totals_; }
    Totals space_totals(std::uint32_t space) const;
    std::uint64_t leased() const { return leased_; }
    std::uint64_t pinned() const { return pinned_; }
    std::size_t nbytes() const;

  private:
    Record& at(Slot slot);
    void check(const Slot* slots, std::size_t count) const;

    void add_to_space(const Record& record);
    void take_from_space(const Record& record);
    void link(Slot slot);
    void unlink(Slot slot);
    void to_front(Slot slot);
    bool has_child(const Key& key) const;
    void reconsider_all(const Key& key);

    // The order of eviction: among the candidates of a kind by age, among the kinds by what the forecast makes of the oldest.
    bool candidate(Slot slot) const;
    bool before(Slot a, Slot b) const { return ticks_[a] < ticks_[b]; }

    std::uint64_t ghost_name(const Record& record) const;
    void begin_wait(Slot slot);
    void end_wait(Slot slot);
    void use_again(Slot slot);

    void reconsider(Slot slot);
    using Heap = Chunked<Slot>;
    Heap& heap_of(Slot slot) { return heaps_[records_[slot].kind]; }
    void place(Heap& heap, std::size_t position, Slot slot);
    void sift_up(Heap& heap, std::size_t position);
    void sift_down(Heap& heap, std::size_t position);
    void heap_push(Slot slot);
    void heap_remove(Slot slot);

    Policy policy_;
    Records records_;
    Chains by_key_;
    Chains by_parent_;
    Chunked<std::uint64_t> ticks_;    // apart from the records: the heap reads them alone, and a million fit a CPU cache
    Chunked<std::uint32_t> position_;  // of a slot in the heap, kNone when it may not be evicted
    std::array<Heap, kKinds> heaps_;
    std::optional<Forecast> forecast_;
    std::optional<Ghosts> ghosts_;
    std::unordered_map<std::uint32_t, Totals> spaces_;
    Slot free_ = kNone;
    std::uint64_t clock_ = 0;
    Totals totals_;
    std::uint64_t leased_ = 0;
    std::uint64_t pinned_ = 0;
};

}  // namespace retain
