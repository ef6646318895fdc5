// The streams of one part of a block: classes and base numbers in the first, one refinement in each of the others.
//
// docs/codecs.md describes them. A part has `components` rows of `tokens` numbers. A component's class says how large its
// numbers are; a token's `steps` and `energy` shift the class for that token. Rows whose class is below the level's
// first are all zero and take no symbols.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "rans.hpp"

namespace retain::ladder {

constexpr std::size_t kClasses = 40;
constexpr std::size_t kLevels = 4;
constexpr std::size_t kSideTables = 3;  // of steps, energy, and class less the expected class
constexpr std::int32_t kLargest = 1213;  // of a base number: three refinements of it still fit 16 bits
constexpr std::int32_t kLeastStep = -6, kMostStep = 9;
constexpr std::int32_t kMostEnergy = 4;  // either side of 0

class Tables {
  public:
    // `frequencies` [kClasses + kSideTables][128], each row summing to 4096; `splits` [kLevels - 1][kClasses][4][2], where
    // 0 and +1 start; `first` [kLevels], falling. Throws std::invalid_argument for what cannot be coded with.
    Tables(const std::uint16_t* frequencies, const std::uint16_t* splits, const std::uint8_t* first,
           const rans::Kernels& kernels);

    const rans::Kernels& kernels() const { return *kernels_; }
    const std::uint32_t* decode() const { return decode_.data(); }
    const std::uint32_t* encode() const { return encode_.data(); }
    const std::uint32_t* splits(std::size_t level) const { return splits_.data() + (level - 1) * kClasses * rans::kContexts; }
    std::int32_t first(std::size_t level) const { return first_[level]; }

  private:
    const rans::Kernels* kernels_;
    std::vector<std::uint32_t> decode_, encode_, splits_;
    std::int32_t first_[kLevels];
};

struct Part {
    std::size_t components, tokens;
    std::int16_t* numbers;         // [components][tokens]
    std::uint8_t* classes;         // [components]
    const std::uint8_t* expected;  // [components]
    std::int8_t* steps;            // [tokens]
    std::int8_t* energy;           // [tokens]
};

struct Bytes {
    const std::uint8_t* data;
    std::size_t size;
};

// The streams of levels 0 .. `level`, of which `numbers` are those of the last; they are those of level 0 afterwards.
// Throws std::invalid_argument for classes and numbers that have no code.
std::vector<std::vector<std::uint8_t>> encode(const Tables& tables, const Part& part, std::size_t level);

// Fills the part from the streams of its first levels. Throws std::invalid_argument where they are not what an encoder
// writes; the part's arrays are then undefined.
void decode(const Tables& tables, const Part& part, const std::vector<Bytes>& streams);

}  // namespace retain::ladder
