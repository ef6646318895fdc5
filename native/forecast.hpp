// What to expect of a record: how soon one that was used so often, so long ago, is likely to be used again.
//
// Learned from the index's own past, evicted records included. Time is counted in insertions and touches ("ticks") and
// in epochs, about 32 of which pass while as many records are used as the index holds.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "chunked.hpp"

namespace retain {

// Records are told apart by how often they were used before: never, once, twice, 3 to 5 times, 6 to 15, more.
inline constexpr std::size_t kKinds = 6;
std::uint8_t kind_of(std::uint8_t uses);

// Rates of use by kind and age. The value of a record is the Gittins index of its wait: the best ratio, over all times it
// might be kept for, of the chance that it is used by then to the time it is expected to take room for.
class Forecast {
  public:
    Forecast();

    // One tick passes in an index of `count` records.
    void advance(std::uint64_t now, std::uint64_t count);
    // A record was used at `tick`, and is waited for from then on as one of `kind`.
    void wait(std::uint8_t kind, std::uint64_t tick);
    // It was used again; or it was forgotten, and nobody will know. False where that wait was watched no more.
    void used(std::uint8_t kind, std::uint64_t tick);
    bool lost(std::uint8_t kind, std::uint64_t tick);
    // Uses per tick of room to expect of a record; comparable among kinds and ages.
    double value(std::uint8_t kind, std::uint64_t tick) const;

    std::size_t nbytes() const { return waiting_.capacity() * sizeof(std::uint32_t); }

  private:
    static constexpr std::size_t kEpochs = 512;    // watched; older waits count as that old
    static constexpr std::size_t kAges = 4 * 64;   // four to an octave of ticks
    static std::size_t age_class(std::uint64_t age);
    static double width(std::size_t age_class);

    std::uint64_t age(std::uint64_t epoch) const;
    std::uint32_t* waiting(std::uint8_t kind, std::uint64_t tick);
    void turn();
    void widen();

    using Ages = std::array<double, kAges>;
    std::vector<std::uint32_t> waiting_;     // by kind and epoch of the last use, a ring
    std::array<Ages, kKinds> uses_{};         // seen in epochs that ended, by kind and age
    std::array<Ages, kKinds> recent_uses_{};  // in this epoch
    std::array<Ages, kKinds> watched_{};      // ticks of waiting seen in epochs that ended, by kind and age
    mutable std::array<Ages, kKinds> values_{};  // remembered until the epoch ends; negative: not known yet
    unsigned shift_;                         // an epoch is 2**shift ticks
    std::uint64_t epoch_ = 0;
};

// The uses and last tick of records that are gone. A table of buckets that grows by one bucket at a time (linear hashing); a
// full bucket forgets its oldest.
class Ghosts {
  public:
    struct Ghost {
        std::uint64_t name;  // a hash of key and form, of kNameBits; 0: none
        std::uint64_t tick;
        std::uint8_t uses;
    };
    static constexpr unsigned kNameBits = 48;

    Ghosts();
    // Remember; returns what was forgotten for it, its name 0 if nothing was.
    Ghost put(const Ghost& ghost, std::uint64_t count);
    // Take out what is known of a name; a ghost of name 0 if nothing is.
    Ghost take(std::uint64_t name);
    std::size_t nbytes() const { return buckets_.nbytes(); }

  private:
    static constexpr std::size_t kWays = 8;
    // 12 bytes: 48 bits of name, 40 of ticks in steps of 2**5 (a year at a million a second), 8 of uses.
    struct Packed {
        std::array<std::uint32_t, 3> words;

        static Packed from(const Ghost& ghost);
        Ghost ghost() const;
        std::uint64_t name() const { return words[0] | (std::uint64_t{words[1] & 0xFFFFu} << 32); }
        std::uint64_t steps() const { return (words[1] >> 16) | (std::uint64_t{words[2] & 0xFFFFFFu} << 16); }
    };
    using Bucket = std::array<Packed, kWays>;

    Bucket& bucket(std::uint64_t name);
    void split();

    Chunked<Bucket, 5> buckets_;
    std::size_t low_;
};

}  // namespace retain
